"""Streamed text equals decoded text for every family, and no piece ends inside a character."""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models as rust_models

from headrace.models.text.detokenizer import Detokenizer, DetokenizerFactory, byte_alphabet
from headrace.models.text.tokenizer import Tokenizer
from tests.support.corpus import NASTY
from tests.support.families import FAMILIES, write_family

# Decoder sections seen in checkpoints, beside those of the families. The last three have no table here.
_DECODERS: dict[str, dict[str, Any]] = {
    "metaspace never": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": True},
    "metaspace first": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True},
    "metaspace in a sequence": {
        "type": "Sequence",
        "decoders": [{"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}],
    },
    "byte-level in a sequence": {
        "type": "Sequence",
        "decoders": [{"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}],
    },
    "strip two": {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 2, "stop": 0},
        ],
    },
    "word pieces": {"type": "WordPiece", "prefix": "##", "cleanup": False},
    "fused only": {"type": "Fuse"},
    "nothing": {},
}


@cache
def tokenizer_of(family: str) -> Tokenizer:
    with TemporaryDirectory() as directory:
        return Tokenizer.load(write_family(Path(directory), family))


@cache
def rust_with(decoder: str) -> RustTokenizer:
    """A vocabulary of awkward pieces with a decoder section."""
    pieces = ["▁", "▁▁a", "▁b", "c▁d", "é", "##x", "Ġe", "Ã", "©", " ", "<0x0A", "<0xzz>", "▁<0x41>", "<s>", "日"]
    pieces += [f"<0x{byte:02X}>" for byte in (0x41, 0x20, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x99, 0x80, 0xFF)]
    rust = RustTokenizer(rust_models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    document = json.loads(rust.to_str())
    document["decoder"] = _DECODERS[decoder] or None
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    document["added_tokens"] = [{"id": pieces.index("<s>"), "content": "<s>", **special}]
    return RustTokenizer.from_str(json.dumps(document))


def stream(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.add(token_id) for token_id in ids), detokenizer.finish()]


@pytest.mark.sampled
@pytest.mark.parametrize("family", FAMILIES)
def test_the_corpus_round_trips(family: str) -> None:
    tokenizer = tokenizer_of(family)
    for text in NASTY:
        for ids in (tokenizer.encode(text), tokenizer.encode(text, special=True), tokenizer.encode(text)[::-1]):
            pieces = stream(tokenizer.detokenizer(), ids)
            assert "".join(pieces) == tokenizer.decode(ids)


@pytest.mark.sampled
@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
def test_any_tokens_stream_as_they_decode(family: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(family)
    low = st.integers(0, 300)
    high = st.integers(0, tokenizer.vocab_size + 3)
    byte_tokens = st.integers(max(0, tokenizer.vocab_size - 260), tokenizer.vocab_size - 1)
    ids = data.draw(st.lists(st.one_of(low, high, byte_tokens), max_size=30))
    expected = tokenizer.decode(ids)
    assert "".join(stream(tokenizer.detokenizer(), ids)) == expected


@pytest.mark.parametrize("decoder", [name for name in _DECODERS if name != "word pieces"])
@given(ids=st.lists(st.integers(0, 28), max_size=20))
def test_any_decoder_section_streams_as_it_decodes(decoder: str, ids: list[int]) -> None:
    rust = rust_with(decoder)
    expected = rust.decode(ids)
    assert "".join(stream(DetokenizerFactory(rust).make(), ids)) == expected


def test_word_pieces_stream_as_they_decode() -> None:
    rust = rust_with("word pieces")
    ids = [rust.token_to_id(piece) for piece in ("é", "##x", "日", "c▁d", "##x")]
    assert "".join(stream(DetokenizerFactory(rust).make(), ids)) == rust.decode(ids) == "éx 日 c▁dx"


@pytest.mark.parametrize("family", ["chatml", "gemma3", "mistral"])
def test_characters_are_emitted_whole(family: str) -> None:
    tokenizer = tokenizer_of(family)
    text = "日本語 👩‍👩‍👧‍👦 é नमस्ते ☃"
    pieces = stream(tokenizer.detokenizer(), tokenizer.encode(text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("family", ["chatml", "gemma3", "mistral"])
def test_a_cut_answer_ends_before_an_incomplete_character(family: str) -> None:
    tokenizer = tokenizer_of(family)
    text = "a 日本語 👩‍👩‍👧‍👦 नमस्ते 🦊"
    ids = tokenizer.encode(text)
    for length in range(len(ids)):
        detokenizer = tokenizer.answer_stream()
        cut = "".join(map(detokenizer.add, ids[:length])) + detokenizer.finish(cut=True)
        assert text.startswith(cut)


@pytest.mark.parametrize("decoder", ["nothing", "strip two", "fused only"])
def test_cut_byte_tokens_end_before_an_incomplete_character(decoder: str) -> None:
    rust = rust_with(decoder)
    detokenizer = DetokenizerFactory(rust).make()
    ids = [rust.token_to_id(piece) for piece in ("é", "<0xF0>", "<0x9F>")]
    said = "".join(map(detokenizer.add, ids)) + detokenizer.finish(cut=True)
    assert said.startswith("é")
    assert "\ufffd" not in said


def test_text_is_emitted_as_soon_as_it_is_final() -> None:
    tokenizer = tokenizer_of("chatml")
    detokenizer = tokenizer.detokenizer()
    for token_id in tokenizer.encode("Hello, world! 1 22"):
        assert detokenizer.add(token_id) == tokenizer.decode([token_id])


def test_bytes_that_cannot_become_a_character_do_not_wait() -> None:
    tokenizer = tokenizer_of("chatml")
    of_byte = {byte: char for char, byte in byte_alphabet().items()}
    euro, start, letter = (tokenizer._rust.token_to_id(of_byte[byte]) for byte in (0xE2, 0xC3, 0x41))
    detokenizer = tokenizer.detokenizer()
    assert stream(detokenizer, [euro, letter, start, start, euro]) == ["", "\ufffdA", "", "\ufffd", "\ufffd", "\ufffd"]


@pytest.mark.parametrize("family", ["chatml", "gemma3"])
def test_special_tokens_have_no_text(family: str) -> None:
    tokenizer = tokenizer_of(family)
    special = FAMILIES[family].special[-1]
    ids = [*tokenizer.encode("a"), *tokenizer.encode(special, special=True), *tokenizer.encode("b")]
    assert "".join(stream(tokenizer.detokenizer(), ids)) == "ab"
    assert tokenizer.decode(ids, skip_special=False) == f"a{special}b"


def test_a_windowed_stream_decodes_a_window_and_not_the_whole() -> None:
    class Counting:
        def __init__(self, rust: RustTokenizer) -> None:
            self._rust = rust
            self.longest = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self._rust, name)

        def decode(self, ids: list[int], **options: bool) -> str:
            self.longest = max(self.longest, len(ids))
            return self._rust.decode(ids, **options)

    rust = Counting(rust_with("fused only"))
    stream(DetokenizerFactory(rust).make(), [4, 14] * 500)  # type: ignore[arg-type]
    assert rust.longest <= 8


def test_the_byte_alphabet_is_the_librarys() -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = byte_alphabet()
    assert set(alphabet) == set(ByteLevel.alphabet())
    assert sorted(alphabet.values()) == list(range(256))
