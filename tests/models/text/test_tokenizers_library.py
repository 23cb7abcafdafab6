"""tokenizer.json files that make the tokenizers library panic or abort: one clear line, and the process goes on.

Those that abort would end the tests; the rest of what the library refuses by itself is in test_tokenizer.py.
"""

import base64
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.models.text.tokenizer import Tokenizer
from headrace.models.text.tokenizers_library import panics_hidden
from headrace.runtime.errors import CheckpointError

BPE: dict[str, Any] = {"type": "BPE", "vocab": {"a": 0, "b": 1, "c": 2, "ab": 3}, "merges": [["a", "b"]]}
UNITS = 1024


def write(directory: Path, **parts: Any) -> Path:
    document = {"version": "1.0", "added_tokens": [], "model": BPE} | parts
    (directory / "tokenizer.json").write_text(json.dumps(document))
    return directory


def charsmap(units: list[int], texts: bytes, size: int | None = None) -> dict[str, Any]:
    trie = struct.pack(f"<{len(units)}I", *units)
    data = struct.pack("<I", len(trie) if size is None else size) + trie + texts
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


def trie_of(letter: str, value: int) -> list[int]:
    """A trie with one key of one letter: the root's children from 256 on, the value of the letter's node at 512."""
    units = [0] * UNITS
    code = ord(letter)
    units[0] = 256 << 10
    place = 256 ^ code
    units[place] = ((512 ^ place) << 10) | 0x100 | code  # has a value
    units[512] = 0x80000000 | value
    return units


BPE_OF_TWO_BYTES = {
    "type": "BPE",
    "continuing_subword_prefix": "\u00e9",
    "vocab": {"a": 0, "\u20ac": 1, "a\u20ac": 2, "\u00e9b": 3},
    "merges": [["a", "\u20ac"]],
}
SPELLED = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def replaced(content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": "a"}, "content": content}


PREPENDED = {"type": "Prepend", "prepend": "a" * 8}


def added(index: int, content: str) -> dict[str, Any]:
    flags = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized", "special"], False)
    return {"id": index, "content": content, **flags}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


HOSTILE: dict[str, dict[str, Any]] = {
    "no character map": {"normalizer": charsmap([], b"")},
    "a character map that is cut off": {"normalizer": charsmap([0] * 8, b"x", size=0xFFFFFFFC)},
    "a size that is no number of units": {"normalizer": charsmap([0] * 8, b"x", size=3)},
    "a root beyond the end": {"normalizer": charsmap([0xFFFFFFFF] * 256, b"x")},
    "too few units": {"normalizer": charsmap([0] * 8, b"x")},
    "a value beyond the texts": {"normalizer": charsmap(trie_of("x", 9), b"y\0")},
    "a value inside of a character": {"normalizer": charsmap(trie_of("x", 1), "\u00e9\0".encode())},
    "texts that are none": {"normalizer": charsmap(trie_of("x", 0), b"\xff\0")},
    "not base64": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "?"}},
    "deep inside": {"normalizer": {"type": "Sequence", "normalizers": [charsmap([0] * 8, b"x")]}},
    "pieces of length 0": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "bytes spelled out sixty times": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [SPELLED] * 60}},
    "letters doubled thirty times": {"normalizer": {"type": "Sequence", "normalizers": [replaced("aa")] * 30}},
    "a letter that becomes a book": {"normalizer": replaced("a" * 2000)},
    "a book before every text": {"normalizer": {"type": "Prepend", "prepend": "a" * 2000}},
    "pages before every text": {"normalizer": {"type": "Sequence", "normalizers": [PREPENDED] * 200}},
    "letters that come out doubled thirty times": {"decoder": {"type": "Sequence", "decoders": [replaced("aa")] * 30}},
    "a letter that comes out as a book": {"decoder": replaced("a" * 2000)},
    "ends of tokens": {"decoder": {"type": "Strip", "content": "a", "start": 0, "stop": 5}},
    "WordPiece without unknown": {"model": {"type": "WordPiece", "unk_token": "?", "vocab": {"a": 0}}},
    "WordLevel without unknown": {"model": {"type": "WordLevel", "unk_token": "?", "vocab": {"a": 0}}},
    "words without a type and unknown": {"model": {"unk_token": "?", "vocab": {"a": 0}}},
    "pieces without a type and unknown": {
        "model": {
            "unk_token": "?",
            "vocab": {"a": 0},
            "continuing_subword_prefix": "#",
            "max_input_chars_per_word": 9,
        }
    },
    "an id that takes gigabytes": {
        "model": {"type": "WordLevel", "unk_token": "?", "vocab": {"a": 0, "?": 1510000000}}
    },
    "an added id that takes gigabytes": {"added_tokens": [{"id": 1510000000, "content": "<s>", "special": True}]},
    "half a character of a merge": {"model": BPE_OF_TWO_BYTES},
    "a prefix that is longer": {"model": BPE | {"continuing_subword_prefix": "########"}},
    "a pattern of thousands of classes": {"pre_tokenizer": split("\\p{L}" * 7000)},
    "patterns of thousands of classes": {
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split("\\p{L}" * 200)] * 40}
    },
    "a search that takes too many tries": {
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    },
    "a merge that is too long": {"model": BPE | {"merges": [["a", "b"], ["ab", "ab"]]}},  # panics, at load
}
# Contents of too many added tokens, made by the tests alone: all processes import this file.
ADDED: dict[str, Callable[[], list[str]]] = {
    "a library of added tokens": lambda: ["a" * (i + 1) for i in range(1500)],
    "very many added tokens": lambda: [f"<|{i:>50}|>" for i in range(20_500)],
    "very many short added tokens": lambda: [f"{i:x}" for i in range((1 << 17) + 1)],
}


@pytest.mark.parametrize("case", HOSTILE)
def test_files_that_panic_or_abort_are_refused_at_load(
    tmp_path: Path, case: str, capfd: pytest.CaptureFixture[str]
) -> None:
    _expect_refusal(tmp_path, HOSTILE[case], capfd)


@pytest.mark.sampled
@pytest.mark.parametrize("case", ADDED)
def test_too_many_added_tokens_are_refused_at_load(
    tmp_path: Path, case: str, capfd: pytest.CaptureFixture[str]
) -> None:
    tokens = [added(4 + i, content) for i, content in enumerate(ADDED[case]())]
    _expect_refusal(tmp_path, {"added_tokens": tokens}, capfd)


def _expect_refusal(tmp_path: Path, parts: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CheckpointError, match=r"^(tokenizer\.json|the tokenizer) .+") as caught:
        Tokenizer.load(write(tmp_path, **parts))
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""


WORDS = {"type": "WordLevel", "unk_token": "?", "vocab": {"a": 0, "?": 1}}


@pytest.mark.parametrize(
    ("parts", "fault"),
    [
        ({"model": None}, "Expected `object`"),
        ({"model": BPE | {"type": ["BPE"]}}, r"\$\.model\.type"),
        ({"model": BPE | {"continuing_subword_prefix": 3}}, r"\$\.model\.continuing_subword_prefix"),
        ({"model": BPE | {"continuing_subword_prefix": "#", "merges": 3}}, "Expected `array"),
        ({"model": BPE | {"continuing_subword_prefix": "#", "merges": [3]}}, "Expected `str"),
        ({"model": BPE | {"continuing_subword_prefix": "#", "merges": [["a"]]}}, "Expected `array` of length 2"),
        ({"model": WORDS | {"unk_token": ["?"]}}, r"\$\.model\.unk_token"),
        ({"model": WORDS | {"vocab": None}}, "no unknown token"),
        ({"model": WORDS | {"vocab": 5}}, "no unknown token"),
        ({"added_tokens": 5}, r"\$\.added_tokens"),
    ],
)
def test_a_part_of_another_type_is_named(tmp_path: Path, parts: dict[str, Any], fault: str) -> None:
    with pytest.raises(CheckpointError, match=f"^tokenizer.json cannot be read: .*{fault}"):
        Tokenizer.load(write(tmp_path, **parts))


@pytest.mark.parametrize(
    "model", [{"vocab": {"a": 0, "b": 1}, "merges": []}, {"vocab": {"a": 0, "b": 1}, "unk_token": "b"}]
)
def test_models_without_a_type_are_read(tmp_path: Path, model: dict[str, Any]) -> None:
    assert Tokenizer.load(write(tmp_path, model=model)).encode("a") == [0]


def test_merges_of_null_are_left_to_the_library(tmp_path: Path) -> None:
    model = BPE | {"continuing_subword_prefix": "#", "merges": None}
    with pytest.raises(CheckpointError, match=r"^(?!.*NoneType)"):
        Tokenizer.load(write(tmp_path, model=model))


def test_only_panic_messages_are_removed_from_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    with panics_hidden():
        os.write(2, b"a line\nthread '<unnamed>' (7) panicked at x.rs:1:2:\nno\nstack backtrace:\n")
    with panics_hidden():
        os.write(2, b"another line\n")
    assert capfd.readouterr().err == "a line\nanother line\n"


@pytest.mark.parametrize(
    ("text", "repeated"),
    [
        ('"model":', '"model": {"type": "BPE", "continuing_subword_prefix": "\u00e9", "vocab": {"\u20ac": 0, "a": 1, '
         '"a\u20ac": 2, "\u00e9b": 3}, "merges": [["a", "\u20ac"]]}, "model":'),
        ('"vocab":', '"vocab": {}, "v\\u006fcab":'),
    ],
)  # fmt: skip
def test_a_repeated_key_in_a_tokenizer_is_refused(tmp_path: Path, text: str, repeated: str) -> None:
    file = write(tmp_path) / "tokenizer.json"
    file.write_text(file.read_text().replace(text, repeated), "utf-8")
    with pytest.raises(CheckpointError, match="a key is repeated"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("prefix", ["\\u0046ixedLength", "Fixed\\u004cength"])
def test_escaped_names_do_not_bypass_the_checks_of_a_tokenizer(tmp_path: Path, prefix: str) -> None:
    write(tmp_path, pre_tokenizer={"type": "FixedLength", "length": 0})
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace("FixedLength", prefix))
    with pytest.raises(CheckpointError, match="length 0"):
        Tokenizer.load(tmp_path)


def test_a_valid_character_map_is_accepted(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write(tmp_path, normalizer=charsmap(trie_of("x", 0), b"b\0")))
    assert tokenizer.encode("ax") == tokenizer.encode("ab") == [3]


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(z+)+$"}, "behavior": "Isolated", "invert": False}},
         "z" * 100 + "!"),  # panics: too many retries
        ({"model": {"type": "Unigram", "unk_id": None, "vocab": [["a", -1.0]]}}, "z"),
        ({"model": BPE | {"unk_token": "?"}}, "z"),
    ],
)  # fmt: skip
def test_a_failure_at_one_text_is_a_checkpoint_error(tmp_path: Path, parts: dict[str, Any], text: str) -> None:
    tokenizer = Tokenizer.load(write(tmp_path, **parts))
    with pytest.raises(CheckpointError, match="the tokenizer failed"):
        tokenizer.encode(text)
    assert tokenizer.encode("a") == [0]
