"""Token ids to text, one at a time: what `Tokenizer.decode` says of the whole sequence, in linear time.

`add` returns the text that is certain now, `finish` what was still held back; their concatenation equals the
one-shot decoding of the `tokenizers` library. No piece ends inside a character: bytes wait until they are a
character, or cannot become one and turn into U+FFFD.

Two kinds of vocabulary cover the models in use, and have tables here (the library's own `DecodeStream` re-decodes
a growing window while bytes are incomplete, raises on byte runs that turn out malformed, and cannot be flushed):

- byte-level BPE: a token is bytes spelled in a 256-character alphabet;
- SentencePiece: a token is text with `▁` for a space, or one byte `<0xE2>`.

Any other decoder goes through the library itself, over a window that is cut at every complete character.
"""

import codecs
import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from headrace.models.text.tokenizers_library import library_errors

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """One stream of tokens; a new one is made for every answer."""

    def add(self, token_id: int) -> str:
        """The text that became certain with this token; often empty."""

    def finish(self) -> str:
        """The text still held back; the stream is over."""


class DetokenizerFactory:
    """Reads a tokenizer's decoder section once and makes a Detokenizer per stream."""

    def __init__(self, tokenizer: "RustTokenizer") -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(
            index for index, added in tokenizer.get_added_tokens_decoder().items() if added.special
        )
        self._bytes_of: dict[int, bytes] = {}  # shared cache of byte-level tokens
        decoder = tokenizer.decoder
        self._steps = _flatten(json.loads(decoder.__getstate__())) if decoder is not None else []

    def make(self, *, skip_special: bool = True) -> Detokenizer:
        skipped = self._special if skip_special else frozenset[int]()
        kinds = [step["type"] for step in self._steps]
        if kinds == ["ByteLevel"]:
            return _ByteLevel(self._tokenizer.id_to_token, self._bytes_of, skipped)
        if (rules := _SentencePieceRules.read(self._steps)) is not None:
            return _SentencePiece(self._tokenizer.id_to_token, rules, skipped)
        return _Windowed(self._tokenizer, skip_special)


def _flatten(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _flatten(inner)]


# --- byte-level BPE ----------------------------------------------------------------------------------------


def byte_alphabet() -> dict[str, int]:
    """The character GPT-2's vocabulary spells each byte with: itself if visible in Latin-1, else one from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF = byte_alphabet()


class _ByteLevel:
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
            data = self._bytes_of[token_id] = self._spelled(token_id)
        return self._utf8.decode(data)

    def finish(self) -> str:
        return self._utf8.decode(b"", True)

    def _spelled(self, token_id: int) -> bytes:
        text = self._text_of(token_id) or ""  # ids beyond the vocabulary (padded heads) say nothing
        try:
            return bytes(_BYTE_OF[char] for char in text)
        except KeyError:  # an added token with characters outside the alphabet stands for itself
            return text.encode()


# --- SentencePiece -----------------------------------------------------------------------------------------


class _SentencePieceRules:
    """What the decoder section does to tokens, in the order it is always written: spaces, bytes, leading strip."""

    def __init__(self, space: str, drops_first_space: bool, byte_tokens: bool, strip: int) -> None:
        self.space = space  # the character that stands for a space
        self.drops_first_space = drops_first_space  # from the first token, wherever in it (Metaspace)
        self.byte_tokens = byte_tokens
        self.strip = strip  # spaces removed from the start of the whole text

    @classmethod
    def read(cls, steps: list[dict[str, Any]]) -> "_SentencePieceRules | None":
        """None if the steps are anything but [Replace|Metaspace, ByteFallback?, Fuse?, Strip?]."""
        order = {"Replace": 0, "Metaspace": 0, "ByteFallback": 1, "Fuse": 2, "Strip": 3}
        places = [order.get(step["type"], -1) for step in steps]
        if not places or places[0] != 0 or places != sorted(set(places)):
            return None
        by_type = {step["type"]: step for step in steps}
        first, strip = steps[0], by_type.get("Strip")
        if first["type"] == "Replace":
            space, drops = first["pattern"].get("String", ""), False
            if len(space) != 1 or first["content"] != " ":
                return None
        else:
            space, drops = first["replacement"], first.get("prepend_scheme", "always") != "never"
        if strip is not None and ("Fuse" not in by_type or strip["content"] != " " or strip["stop"] != 0):
            return None
        return cls(space, drops, "ByteFallback" in by_type, strip["start"] if strip else 0)


class _SentencePiece:
    def __init__(
        self, text_of: Callable[[int], str | None], rules: _SentencePieceRules, skipped: frozenset[int]
    ) -> None:
        self._text_of = text_of
        self._rules = rules
        self._skipped = skipped
        self._is_first = True
        self._to_strip = rules.strip
        self._run = bytearray()  # byte tokens in a row: the library decodes such a run as a whole or not at all

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

    def finish(self) -> str:
        return self._strip(self._end_run())

    def _end_run(self) -> str:
        data = bytes(self._run)
        self._run.clear()
        try:
            return data.decode()
        except UnicodeDecodeError:
            return _REPLACEMENT * len(data)

    def _strip(self, text: str) -> str:
        while self._to_strip and text:
            if text[0] != " ":
                self._to_strip = 0
            else:
                self._to_strip -= 1
                text = text[1:]
        return text


# --- anything else -----------------------------------------------------------------------------------------


class _Windowed:
    """Decodes a short window twice per token, with and without the new one, and says the difference."""

    def __init__(self, tokenizer: "RustTokenizer", skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._said: list[int] = []  # the last tokens said: what the next ones are decoded after
        self._held: list[int] = []

    def add(self, token_id: int) -> str:
        self._held.append(token_id)
        new = self._new_text()
        # Bytes of one character are at most four tokens; more than that is not going to complete.
        if not new or (new.endswith(_REPLACEMENT) and len(self._held) < 4):
            return ""
        self._said, self._held = self._held, []
        return new

    def finish(self) -> str:
        return self._new_text()

    def _new_text(self) -> str:
        before = self._decode(self._said)
        return self._decode(self._said + self._held)[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        with library_errors("the tokenizer failed"):
            return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)
