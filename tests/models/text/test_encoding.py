"""Encoding that takes hours can be ended: at load, by a signal, by a cancelled answer, and by the limit."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest

from headrace.models.text import encoding
from headrace.models.text.encoding import EncodingStoppedError, encoding_ends, limited
from headrace.models.text.tokenizer import Tokenizer
from headrace.models.text.tokenizers_library import text_growth
from headrace.runtime.errors import CheckpointError, ContextLimitError
from tests.models.text.test_tokenizers_library import BPE, SPELLED, replaced, write
from tests.support.patience import PATIENCE_S

BERT = {
    "type": "BertNormalizer",
    "clean_text": True,
    "handle_chinese_chars": True,
    "strip_accents": None,
    "lowercase": True,
}
LETTERS = [*range(0xD800), *range(0xE000, 0x20000), *range(0x2F800, 0x2FA20)]  # without most Chinese ones


def split_on(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def run(program: str) -> str:
    """Run Python; return what it printed. An encoding under way ends with the process."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_regular_expression_that_hangs_on_any_text_is_refused_at_load(tmp_path: Path) -> None:
    write(tmp_path, pre_tokenizer=split_on("(?:.|.){20}(?!.)(?=.)"))
    out = run(f"""
from pathlib import Path
from headrace.models.text import encoding
from headrace.models.text.tokenizer import Tokenizer
from headrace.runtime.errors import CheckpointError
encoding._LONGEST_S = 0.1
try:
    Tokenizer.load(Path({str(tmp_path)!r}))
except CheckpointError as error:
    print(error)
""")
    assert out.startswith("the tokenizer failed: ")
    assert out.count("\n") == 1


def test_a_signal_ends_an_encoding(tmp_path: Path) -> None:
    write(tmp_path, pre_tokenizer=split_on("(?:z|z){20}(?!.)(?=.)"))
    assert (
        run(f"""
import signal
from pathlib import Path
from headrace.models.text.tokenizer import Tokenizer
signal.signal(signal.SIGALRM, signal.default_int_handler)
tokenizer = Tokenizer.load(Path({str(tmp_path)!r}))
signal.setitimer(signal.ITIMER_REAL, 0.1)
try:
    tokenizer.encode("z" * 100_000)
except KeyboardInterrupt:
    print("ended")
""")
        == "ended\n"
    )


@pytest.fixture
def stuck() -> Iterator[threading.Event]:
    """An event that calls of `limited` wait for, set at the end."""
    event = threading.Event()
    yield event
    event.set()


def test_a_cancelled_answer_ends_its_encoding(stuck: threading.Event) -> None:
    with encoding_ends(lambda: True), pytest.raises(EncodingStoppedError):
        limited(stuck.wait, 1)
    with encoding_ends(lambda: True), pytest.raises(EncodingStoppedError):
        limited(lambda: pytest.fail("two calls at a time"), 1)
    stuck.set()
    assert limited(lambda: "next", 1) == "next"


def test_an_encoding_beyond_the_limit_is_an_error(stuck: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "_LONGEST_S", -1.0)
    with pytest.raises(CheckpointError, match="too long"):
        limited(stuck.wait, 1)


def test_the_time_limit_of_an_encoding_ignores_other_threads(
    stuck: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    hours = iter(range(0, 10**9, 3600))
    monkeypatch.setattr("time.process_time", lambda: next(hours))  # of an engine that decodes in this process
    threading.Timer(0.15, stuck.set).start()
    assert limited(stuck.wait, 1)


def test_errors_of_a_limited_call_are_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        limited(lambda: 1 // 0, 1)


def test_a_panic_during_an_encoding_is_one_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tokenizer = Tokenizer.load(write(tmp_path, model=BPE, pre_tokenizer=split_on("(?:z|z){25}(?!.)(?=.)")))
    with pytest.raises(CheckpointError, match=r"^the tokenizer failed: "):
        tokenizer.encode("z" * 30)
    assert capfd.readouterr().err == ""


def test_the_length_of_a_text_is_limited_by_its_growth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "_MOST_NORMALIZED", 400)
    tokenizer = Tokenizer.load(write(tmp_path, normalizer=replaced("b" * 10), pre_tokenizer=SPELLED))
    assert len(tokenizer.encode("a" * 10)) == 100
    with pytest.raises(ContextLimitError, match="11 characters"):
        tokenizer.encode("a" * 11)


@pytest.mark.parametrize(("form", "letter", "characters"), [("NFKC", "\ufdfa", 18), ("NFC", "\U0001d160", 3)])
def test_the_length_of_a_text_is_that_of_its_unicode_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, letter: str, characters: int
) -> None:
    monkeypatch.setattr(encoding, "_MOST_NORMALIZED", 900)
    tokenizer = Tokenizer.load(write(tmp_path, normalizer={"type": form}))
    assert len(tokenizer.encode("a" * 900)) == 900
    tokenizer.encode(letter * (900 // characters))
    longer = 900 // characters + 1
    with pytest.raises(ContextLimitError, match=f": {longer} characters count as {longer * characters}, "):
        tokenizer.encode(letter * longer)


@pytest.mark.parametrize(("steps", "letter", "characters"), [
    ({"pre_tokenizer": SPELLED}, "a", 1),
    ({"pre_tokenizer": SPELLED}, "\u00e9", 2),
    ({"pre_tokenizer": SPELLED}, "\U0001f980", 4),
    ({"pre_tokenizer": SPELLED, "normalizer": {"type": "NFD"}}, "\u00e9", 3),
    ({"normalizer": {"type": "Lowercase"}}, "\u0130", 2),
    ({"normalizer": BERT}, "\u6c34", 3),
    ({"normalizer": {"type": "Lowercase"}, "pre_tokenizer": SPELLED}, "\U0001f980", 8),
])  # fmt: skip
def test_the_length_of_a_text_is_limited_by_the_bytes_and_letters_it_becomes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: dict[str, Any], letter: str, characters: int
) -> None:
    monkeypatch.setattr(encoding, "_MOST_NORMALIZED", 9600)
    tokenizer = Tokenizer.load(write(tmp_path, **steps))
    tokenizer.encode(letter * (9600 // characters))
    with pytest.raises(ContextLimitError, match="count as"):
        tokenizer.encode(letter * (9600 // characters + 1))


@pytest.mark.parametrize("kind", ["BertNormalizer", "Lowercase"])
def test_no_character_grows_more_than_the_limit_allows(kind: str) -> None:
    from tokenizers import normalizers

    normalizer = getattr(normalizers, kind)()
    longest = max(len(normalizer.normalize_str(chr(code))) for code in LETTERS)
    assert longest == text_growth({"type": kind})


def test_unicode_normalization_of_many_accents_is_done_in_short_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python sorts the accents of a letter in quadratic time, and no other thread runs meanwhile."""
    lengths: list[int] = []

    def measured(form: Any, text: str) -> str:
        lengths.append(len(text))
        return normalize(form, text)

    monkeypatch.setattr(encoding, "_MOST_NORMALIZED", 900)
    monkeypatch.setattr(encoding, "normalize", measured)
    tokenizer = Tokenizer.load(write(tmp_path, normalizer={"type": "NFC"}))
    lengths.clear()  # of the texts at load
    with pytest.raises(ContextLimitError):
        tokenizer.encode("\u0301\u0316" * 4096)
    assert sum(lengths) == 8192
    assert max(lengths) <= 256


@pytest.mark.parametrize("steps", [
    {"normalizer": {"type": "Sequence", "normalizers": [replaced("a" * 9), replaced("a" * 9)]}},
    {"normalizer": replaced("b" * 65)},
    {"decoder": {"type": "Replace", "pattern": {"Regex": "a"}, "content": "b"}},
])  # fmt: skip
def test_files_that_multiply_texts_or_search_answers_are_refused(tmp_path: Path, steps: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"^the tokenizer cannot be used: "):
        Tokenizer.load(write(tmp_path, **steps))


def test_ids_are_those_of_the_library(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Library

    write(tmp_path, model=BPE, pre_tokenizer=split_on(r"\s+"))
    library = Library.from_str(json.dumps(json.loads((tmp_path / "tokenizer.json").read_text())))
    for text in ("", "ab", "a b ab", "abc" * 50):
        assert Tokenizer.load(tmp_path).encode(text) == library.encode(text, add_special_tokens=False).ids
