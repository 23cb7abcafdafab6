"""Incremental conversion of token ids to text, equal to `Tokenizer.decode` of the whole sequence, in linear time.

`add` returns the text that is complete, `finish` the rest. No piece ends inside a character: bytes are held back until
they form a character or can only become U+FFFD.

Two kinds of vocabulary have tables here:

- byte-level BPE: a token is bytes spelled in a 256-character alphabet;
- SentencePiece: a token is text with `▁` for a space, or one byte `<0xE2>`.

Other decoders use the library on a window that is cut at every complete character. The library's `DecodeStream` is not
used: it re-decodes a growing window, raises on malformed byte runs and cannot be flushed (docs/workarounds.md).

Guard: tests/models/text/test_detokenizer.py.
"""

import codecs
import json
import re
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from headrace.models.text.tokenizers_library import library_errors

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

# A token of one byte, `<0xE2>`: its hexadecimal digits.
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """A stream of tokens of one answer."""

    def add(self, token_id: int) -> str:
        """Return the text that this token completed; often empty."""

    def finish(self, *, cut: bool = False) -> str:
        """End the stream and return the text held back. cut: without a character that is incomplete at the end."""


class DetokenizerFactory:
    """Factory of detokenizers that parses a tokenizer's decoder section once. special: ids that no text has."""

    def __init__(self, tokenizer: "RustTokenizer") -> None:
        self._tokenizer = tokenizer
        self.special = frozenset(
            index for index, added in tokenizer.get_added_tokens_decoder().items() if added.special
        )
        self._bytes_of: dict[int, bytes] = {}  # shared cache of byte-level tokens
        decoder = tokenizer.decoder
        if decoder is not None:
            self._steps = _flatten(json.loads(decoder.__getstate__()))
        else:
            self._steps = []

    def make(self) -> Detokenizer:
        """Return a detokenizer for one answer."""
        kinds = [step["type"] for step in self._steps]
        if kinds == ["ByteLevel"]:
            return _ByteLevel(self._tokenizer.id_to_token, self._bytes_of, self.special)
        if (rules := _SentencePieceRules.read(self._steps)) is not None:
            return _SentencePiece(self._tokenizer.id_to_token, rules, self.special)
        return _Windowed(self._tokenizer)

    @property
    def strips_first_space(self) -> bool:
        """True if a space at the beginning of an answer is not part of its text."""
        rules = _SentencePieceRules.read(self._steps)
        return rules is not None and (rules.drops_first_space or rules.strip > 0)

    def token_bytes(self, vocab_size: int) -> list[bytes] | None:
        """Return the bytes that each token id below `vocab_size` adds within a text; None if these are not fixed."""
        bytes_of = self._bytes_of_text
        text_of = self._tokenizer.id_to_token
        if bytes_of is None:
            return None
        return [bytes_of(text_of(index) or "") for index in range(vocab_size)]

    def bytes_of(self, token_id: int) -> bytes | None:
        """Return the bytes that a token adds within a text; None if these are not fixed."""
        bytes_of = self._bytes_of_text
        if bytes_of is None:
            return None
        return bytes_of(self._tokenizer.id_to_token(token_id) or "")

    @cached_property
    def _bytes_of_text(self) -> Callable[[str], bytes] | None:
        """Return the conversion of a vocabulary's text to bytes; None if these depend on other tokens."""
        if [step["type"] for step in self._steps] == ["ByteLevel"]:
            return _bytes_spelled
        rules = _SentencePieceRules.read(self._steps)
        return None if rules is None else rules.bytes_of


def _flatten(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the steps of a decoder section in order, those of nested sequences too."""
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _flatten(inner)]


# --- byte-level BPE ----------------------------------------------------------------------------------------


def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's byte alphabet: visible Latin-1 characters stand for themselves, other bytes from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF = byte_alphabet()
_CHARACTER_OF = {byte: char for char, byte in _BYTE_OF.items()}


def spelled(token: bytes) -> str:
    """Return the text of a byte-level token in the vocabulary."""
    return token.decode("latin-1").translate(_CHARACTER_OF)


class _ByteLevel:
    """Detokenizer of byte-level BPE.

    text_of: returns a token's text in the vocabulary; None if there is none.
    bytes_of: cache of the bytes of tokens, which all detokenizers of a tokenizer share.
    skipped: ids of tokens without a text.
    """

    def __init__(
        self, text_of: Callable[[int], str | None], bytes_of: dict[int, bytes], skipped: frozenset[int]
    ) -> None:
        self._text_of = text_of
        self._bytes_of = bytes_of
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        if (data := self._bytes_of.get(token_id)) is None:
            # Ids beyond the vocabulary (padded heads) have no text.
            data = self._bytes_of[token_id] = _bytes_spelled(self._text_of(token_id) or "")
        return self._utf8.decode(data)

    def finish(self, *, cut: bool = False) -> str:
        return "" if cut else self._utf8.decode(b"", True)  # U+FFFD for a character that is not whole


def _bytes_spelled(text: str) -> bytes:
    """Return the bytes that a byte-level token spells."""
    try:
        return bytes(_BYTE_OF[char] for char in text)
    except KeyError:  # an added token with characters outside the alphabet is plain text
        return text.encode()


# --- SentencePiece -----------------------------------------------------------------------------------------


class _SentencePieceRules:
    """Steps of the decoder section in their fixed order: spaces, bytes, leading strip."""

    def __init__(self, space: str, drops_first_space: bool, byte_tokens: bool, strip: int) -> None:
        self.space = space  # stands for a space
        self.drops_first_space = drops_first_space  # of the first token, at any position (Metaspace)
        self.byte_tokens = byte_tokens  # tokens such as <0xE2> are bytes
        self.strip = strip  # spaces removed from the start of the text

    def bytes_of(self, token: str) -> bytes:
        """Return the bytes of a token within a text."""
        text = token.replace(self.space, " ")
        if self.byte_tokens and (byte := _BYTE_TOKEN.fullmatch(text)):
            return bytes([int(byte[1], 16)])
        return text.encode()

    @classmethod
    def read(cls, steps: list[dict[str, Any]]) -> "_SentencePieceRules | None":
        """Return None unless the steps are [Replace|Metaspace, ByteFallback?, Fuse?, Strip?]."""
        order = {"Replace": 0, "Metaspace": 0, "ByteFallback": 1, "Fuse": 2, "Strip": 3}
        positions = [order.get(step["type"], -1) for step in steps]
        if not positions or positions[0] != 0 or positions != sorted(set(positions)):
            return None
        by_type = {step["type"]: step for step in steps}
        first = steps[0]
        strip = by_type.get("Strip")
        if first["type"] == "Replace":
            space = first["pattern"].get("String", "")
            drops = False
            if len(space) != 1 or first["content"] != " ":
                return None
        else:
            space = first["replacement"]
            drops = first.get("prepend_scheme", "always") != "never"
        if strip is not None and ("Fuse" not in by_type or strip["content"] != " " or strip["stop"] != 0):
            return None
        return cls(space, drops, "ByteFallback" in by_type, strip["start"] if strip else 0)


class _SentencePiece:
    """Detokenizer of SentencePiece. text_of, skipped: as of `_ByteLevel`."""

    def __init__(
        self, text_of: Callable[[int], str | None], rules: _SentencePieceRules, skipped: frozenset[int]
    ) -> None:
        self._text_of = text_of
        self._rules = rules
        self._skipped = skipped
        self._is_first = True
        self._to_strip = rules.strip
        self._run = bytearray()  # consecutive byte tokens, which the library decodes all or not at all

    def add(self, token_id: int) -> str:
        if token_id in self._skipped or (token := self._text_of(token_id)) is None:
            return ""
        dropped = self._is_first and self._rules.drops_first_space
        self._is_first = False
        text = token.replace(self._rules.space, "" if dropped else " ")
        if self._rules.byte_tokens and (byte := _BYTE_TOKEN.fullmatch(text)):
            self._run.append(int(byte[1], 16))
            return ""
        return self._strip(self._end_run() + text)

    def finish(self, *, cut: bool = False) -> str:
        return self._strip(self._end_run(cut=cut))

    def _end_run(self, *, cut: bool = False) -> str:
        """Return the text of the byte tokens so far, and begin another run. cut: see `Detokenizer.finish`."""
        data = bytes(self._run)
        self._run.clear()
        try:
            return codecs.getincrementaldecoder("utf-8")().decode(data, final=not cut)
        except UnicodeDecodeError:
            return _REPLACEMENT * len(data)

    def _strip(self, text: str) -> str:
        """Return text without the spaces at the answer's beginning that are still to be removed."""
        while self._to_strip and text:
            if text[0] != " ":
                self._to_strip = 0
            else:
                self._to_strip -= 1
                text = text[1:]
        return text


# --- anything else -----------------------------------------------------------------------------------------


class _Windowed:
    """Detokenizer that decodes a short window with and without the new token and returns the difference."""

    def __init__(self, tokenizer: "RustTokenizer") -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []  # the last returned tokens, which precede the next ones
        self._pending: list[int] = []  # tokens of a character that is not complete yet

    def add(self, token_id: int) -> str:
        self._pending.append(token_id)
        new = self._new_text()
        # Bytes of one character take at most four tokens; longer runs never complete.
        if not new or (new.endswith(_REPLACEMENT) and len(self._pending) < 4):
            return ""
        self._context = self._pending
        self._pending = []
        return new

    def finish(self, *, cut: bool = False) -> str:
        text = self._new_text()
        if cut:
            return text.rstrip(_REPLACEMENT)
        return text

    def _new_text(self) -> str:
        """Return the text of the pending tokens after the context, which may end within a character."""
        before = self._decode(self._context)
        return self._decode(self._context + self._pending)[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        """Return the text of tokens by the library."""
        with library_errors("the tokenizer failed"):
            return self._tokenizer.decode(ids)
