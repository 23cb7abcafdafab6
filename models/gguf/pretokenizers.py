"""Pre-tokenizers of byte-level BPE by their `tokenizer.ggml.pre` names.

Each name stands for a sequence of patterns; each splits the pieces left by the one before. The patterns are facts of
the models, listed in llama.cpp's `llama-vocab.cpp` under these names. `tests/parity/record_llama_cpp.py` recorded
llama.cpp's tokens for each name, and tests/models/gguf/test_tokenizer.py compares: a new name is added there, too.

The families differ in contractions, digits, case and line breaks. "It's 1234 ok?!\\n\\n  iPhone" becomes

    _GPT2     It|'s| 1234| ok|?!|\\n\\n | iPhone
    _LLAMA3   It|'s| |123|4| ok|?!\\n\\n| | iPhone
    _QWEN2    It|'s| |1|2|3|4| ok|?!\\n\\n| | iPhone
    _TEKKEN   It|'s| |1|2|3|4| ok|?!\\n\\n| | i|Phone
    _GPT4O    It's| |123|4| ok|?!\\n\\n| | i|Phone
"""

import re

from msgspec import Struct

from headrace.runtime.errors import UnsupportedModelError


class PreTokenizer(Struct, frozen=True):
    """Rules of one pre-tokenizer."""

    patterns: tuple[str, ...]  # Oniguruma's, as the tokenizers library takes them
    whole_words: bool = False  # a word that is a token is not split by merges
    add_bos: bool = False  # default, where the file does not say it


# Parts that many patterns share: "n't", runs of white space, " word", " !?" with the line breaks after it
_CONTRACTIONS = r"'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"

_GPT2 = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_SIGNS}|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_SEED = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
# Letters except a-z, then letters except A-Z: case in ASCII, any letter elsewhere.
_NOT_LOWER = r"(?:(?=\p{L})[^a-z])"
_NOT_UPPER = r"(?:(?=\p{L})[^A-Z])"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_NOT_LOWER}*{_NOT_UPPER}+|[^\r\n\p{{L}}\p{{N}}]?{_NOT_LOWER}+{_NOT_UPPER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_NOT_LOWER}*{_NOT_UPPER}+(?:{_CONTRACTIONS})?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_NOT_LOWER}+{_NOT_UPPER}*(?:{_CONTRACTIONS})?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
# Words with marks, and with the joiners of Indic and Arabic scripts.
_K2_HORIZON = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}\u200c\u200d]+|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
_EXAONE = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
# Letters of Kimi's words: Chinese characters are words of their own.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_KIMI = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?:{_CONTRACTIONS})?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?:{_CONTRACTIONS})?|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
)
_DEEPSEEK3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
)
_DEEPSEEK3 = rf"{_DEEPSEEK3_WORDS}[\r\n]*|{_SPACES}"
_CHINESE_JAPANESE = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
# Hexadecimal codes of letters with two cases, as DeepSeek's first tokenizer lists them, without small Armenian ones.
_CASED_CODES = """
    41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376-377 37B-37D 37F 386 388-38A 38C 38E-3A1
    3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A
    1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4
    1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128
    212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183-2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2-2CF3 A640-A66D
    A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F
    104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943
"""
# As the inside of a character class, "A-Za-zµÀ-Ö...": each code becomes its character, and white space goes.
_CASED = re.sub(r"\s*([0-9A-F]+)\s*", lambda code: chr(int(code[1], 16)), _CASED_CODES)
# Digits in groups of three from the right.
_GROUPED_DIGITS = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_ASIAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
# Words that begin with upper case or consist of it, with the contractions after them.
_BIG = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BY_CASE = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_BIG}*{_SMALL}+(?:{_CONTRACTIONS})?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_BIG}+{_SMALL}*(?:{_CONTRACTIONS})?"
)
_SIGNS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_YOUTU_SCRIPTS = (
    "[\uac00-\ud7a3\u3131-\u318e]+"
    "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    f"|[\u3105-\u312f]+|{_CHINESE_JAPANESE}"
)
# Runs of spaces in powers of two, at the end of a run
_HALVES = "|".join(rf"\s{{{count}}}(?!\S)" for count in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2"))

_BY_NAME = {
    "default": PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((_GPT2,)),
    "smollm": PreTokenizer((r"\p{N}", _GPT2)),
    "llama-bpe": PreTokenizer((_LLAMA3,), whole_words=True, add_bos=True),
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "qwen2": PreTokenizer((_QWEN2,)),
    "qwen35": PreTokenizer((_QWEN35,)),
    "tekken": PreTokenizer((_TEKKEN,), whole_words=True, add_bos=True),
    "falcon": PreTokenizer((r"[\p{P}$+<=>^~|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_CASED}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+\z",
            "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
            r"\p{N}+",
        )
    ),
    "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", _CHINESE_JAPANESE, _DEEPSEEK3)),
    "spark2_5": PreTokenizer(
        (
            r"\p{N}{1,3}",
            _CHINESE_JAPANESE,
            rf"{_DEEPSEEK3_WORDS}|[\r\n]|\s+(?!\S)|\s+",
            r"\p{N}",
        )
    ),
    "afmoe": PreTokenizer((_GROUPED_DIGITS, _ASIAN, _DEEPSEEK3)),
    "tiny_aya": PreTokenizer(
        (r"\d{1,3}(?=(?:\d{3})*\b)", rf"{_BY_CASE}|\p{{N}}{{1,3}}|{_SIGNS_AND_SLASHES}|{_SPACES}")
    ),
    "youtu": PreTokenizer((_YOUTU_SCRIPTS, rf"{_BY_CASE}|\p{{N}}|{_SIGNS_AND_SLASHES}|{_SPACES}"), whole_words=True),
    "glm4": PreTokenizer((_LLAMA3,), whole_words=True),
    "k2-horizon": PreTokenizer((_K2_HORIZON,)),
    "jais-2": PreTokenizer((rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS}|\s*[\r\n]+|{_HALVES}|\s",)),
    "laguna": PreTokenizer((r"[^\n]+|\n+", _QWEN2)),
    "minicpm5": PreTokenizer(
        (r"\p{N}{1,3}", rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}+|{_SIGNS}|{_SPACES}"), whole_words=True
    ),
    "superbpe": PreTokenizer((r"\p{N}+", r"[0-9]{1,3}(?=(?:[0-9]{3})*(?![0-9]))")),
    "ufakzeka": PreTokenizer((rf"{_WORDS}|\p{{N}}|{_SIGNS}|{_SPACES}",)),
    "seed-coder": PreTokenizer((_SEED,)),
    "gpt-4o": PreTokenizer((_GPT4O,)),
    "exaone-moe": PreTokenizer((_EXAONE,)),
    "kimi-k2": PreTokenizer((_KIMI,)),
    "bloom": PreTokenizer((r" ?[^(\s|.,!?…。，、।۔،)]+",)),
    "viking": PreTokenizer((r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}")),
}
# Names whose patterns are those of another
_SAME_AS = {
    "phi-2": "gpt-2",
    "exaone4": "gpt-2",
    "jina-v2-de": "gpt-2",
    "gigachat": "gpt-2",
    "glm5": "glm4",
    "chatglm-bpe": "smaug-bpe",
    "lfm2": "llama-bpe",
    "falcon-h1": "llama-bpe",
    "midm-2.0": "llama-bpe",
    "a.x-4.0": "gpt-2",
    "mellum": "gpt-2",
    "hunyuan": "qwen2",
    "kormo": "qwen2",
    "hunyuan-dense": "deepseek-v3",
    "llama4": "gpt-4o",
    "mpt": "gpt-2",
    "olmo": "gpt-2",
    "starcoder": "smollm",
    "refact": "smollm",
    "command-r": "smollm",
    "codeshell": "smollm",
    "exaone": "smollm",
    "minerva-7b": "smollm",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "falcon3": "llama-bpe",
    "pixtral": "llama-bpe",
    "dbrx": "smaug-bpe",
    "stablelm2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
    "megrez": "qwen2",
    "solar-open": "qwen2",
    "f2llmv2": "qwen2",
    "grok-2": "qwen2",
    "minimax-m2": "gpt-4o",
    "kanana2": "gpt-4o",
    "bailingmoe": "qwen2",  # its runs of newlines end alike
    "bailingmoe2": "qwen2",
    "llada-moe": "qwen2",
    "joyai-llm": "deepseek-v3",
    "hy_v4": "deepseek-v3",
    "cohere2moe": "tiny_aya",
    "talkie": "gpt-4o",
    "jina-es": "gpt-2",
    "jina-de": "gpt-2",
    "jina-v2-es": "gpt-2",
    "modern-bert": "gpt-2",
    "jina-v5-nano": "llama-bpe",
    "mellum2": "smollm",
    "trillion": "gpt-2",
    "granite-docling": "gpt-2",
    "jais": "gpt-2",
    "poro-chat": "bloom",
    "gpt3-finnish": "bloom",
}


def pre_tokenizer(name: str) -> PreTokenizer:
    """Return the pre-tokenizer of a GGUF name. Raises UnsupportedModelError for an unknown one."""
    known = _BY_NAME.get(_SAME_AS.get(name, name))
    if known is None:
        raise UnsupportedModelError(f"the tokenizer's pre-tokenizer {name!r} is not supported")
    return known
