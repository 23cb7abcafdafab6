"""Pre-tokenizers, against the patterns that the models' own tokenizer.json have, run by another engine."""

from typing import Any

import pytest

from tests.models.gguf.test_tokenizer import LLAMA_CPP, SAME_TOKENS, differences, of_case
from tests.support.corpus import NASTY

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SIGNS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_CONTRACTIONS}|{_BEFORE}\p{{L}}+"
_BIG = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _by_case(big: str = _BIG, small: str = _SMALL) -> str:
    return f"{_BEFORE}{big}*{small}+{_CONTRACTIONS}?|{_BEFORE}{big}+{small}*{_CONTRACTIONS}?"


_NOT_HAN = [kind.replace("]", r"&&[^\p{Han}]]") for kind in (_BIG, _SMALL)]
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_SIGNS}|{_SPACES}"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS}"
_RUNS = "|".join(rf"\s{{{count}}}(?!\S)" for count in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2"))
PATTERNS = {
    "qwen2": [_QWEN2],
    "glm4": [f"{_LLAMA3}|{_SPACES}"],
    "jais-2": [rf"{_LLAMA3}|\s*[\r\n]+|{_RUNS}|\s"],
    "k2-horizon": [rf"{_CONTRACTIONS}|{_BEFORE}(?:\p{{L}}|\p{{M}}|\u200C|\u200D)+|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"],
    "laguna": [r"[^\n]+|[\n]+", _QWEN2],
    "minicpm5": [r"\p{N}{1,3}", rf"{_WORDS}|\p{{N}}+|{_SIGNS}|{_SPACES}"],
    "ufakzeka": [rf"{_BEFORE}\p{{L}}+|\p{{N}}|{_SIGNS}|{_SPACES}"],
    "seed-coder": [rf"{_WORDS}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"],
    "exaone-moe": [
        rf"{_CONTRACTIONS}|{_BEFORE}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
    ],
    "tiny_aya": [r"\d{1,3}(?=(?:\d{3})*\b)", rf"{_by_case()}|\p{{N}}{{1,3}}|{_SIGNS_AND_SLASHES}|{_SPACES}"],
    "youtu": [
        "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
        rf"{_by_case()}|\p{{N}}|{_SIGNS_AND_SLASHES}|{_SPACES}",
    ],
    "kimi-k2": [rf"[\p{{Han}}]+|{_by_case(*_NOT_HAN)}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"],
}
TEXTS = (
    *NASTY,
    "1234abc 1234567 12_345 x1234567y 3.14159265",
    "camelCaseXMLHttp don'T WE'LL HttpRequest",
    "Ankara'da 'S 我喜欢a1234 e\u0301",
    "x" + 700 * " " + "y",
    "नि\u0930्\u200dयात می\u200cروم\u200c 12",
)


def split(patterns: list[str], text: str) -> list[str]:
    """Return the matches of each pattern, and what lies between them, within the pieces of the pattern before."""
    regex: Any = pytest.importorskip("regex")
    pieces = [text]
    for pattern in patterns:
        parts = [regex.split(f"({pattern})", piece, flags=regex.V1) for piece in pieces]
        pieces = [part for piece in parts for part in piece if part]
    return pieces


@pytest.mark.parametrize("name", PATTERNS)
def test_pretokenizers_split_as_the_models_patterns(name: str) -> None:
    splits = of_case(name).pre_tokenizer.pre_tokenize_str
    for text in TEXTS:
        assert [text[start:end] for _, (start, end) in splits(text)] == split(PATTERNS[name], text)


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "case"), SAME_TOKENS.items())
def test_pretokenizer_names_that_llama_cpp_treats_alike_give_the_same_tokens(name: str, case: str) -> None:
    assert case in LLAMA_CPP
    assert differences(of_case(name), case) == []
