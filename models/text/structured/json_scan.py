"""Rules of JSON that a grammar cannot state: long numbers end, keys differ, and each key has one spelling.

By a grammar, numbers may have any digits, and a key that a schema does not name may come twice: models that have lost
their way write both for ever. And `"\\u0061"` is `"a"` to a reader of JSON, but another key to a grammar.

`Matcher` narrows llguidance's masks by it. Guard: tests/models/text/structured/test_json_scan.py.
"""

import re
from collections.abc import Iterable, Sequence
from copy import copy

import numpy as np
from msgspec import Struct

MOST_DIGITS = 20  # in a row: more than a number of 64 bits has, or a double is printed with
_DIGITS = frozenset(b"0123456789")
_QUOTE = ord('"')
_ESCAPE = ord("\\")
_COLON = ord(":")
_OPENING_OBJECT = ord("{")
_OPENING_LIST = ord("[")
_CLOSING = b"}]"
_BETWEEN = b",:"
# A key, or its beginning, in JSON's shortest form: without needless escapes. Group 1: an unended escape.
_SHORTEST = re.compile(
    rb'(?:[^\\]|\\["\\bfnrt]|\\u00(?:0[0-7be-f]|1[0-9a-f]))*+(\\(?:u(?:0(?:0[01]?)?)?)?)?', re.DOTALL
)
_MAY_GO_ON_AN_ESCAPE = frozenset(b"/u0123456789abcdefABCDEF")  # first bytes of tokens, but for the short escapes'

ByteFlags = np.ndarray[tuple[int], np.dtype[np.bool_]]
"""True for each allowed token, (V,)."""
IndexArray = np.ndarray[tuple[int], np.dtype[np.intp]]


class JsonState(Struct, frozen=True):
    """State of a scan of JSON. It is immutable: drafts go on from it.

    levels: the keys of each open object so far, None for a list.
    key: text of the key that is being written; None: elsewhere.
    in_text: in a key or another text.
    escaped: after the backslash of an escape.
    is_value: the next text is no key.
    digits: that came last, in a row.
    breaks: the bytes that led here ended a key that its object has already, or escaped a character without need.
    """

    levels: tuple[frozenset[bytes] | None, ...] = ()
    key: bytes | None = None
    in_text: bool = False
    escaped: bool = False
    is_value: bool = True
    digits: int = 0
    breaks: bool = False

    def after(self, data: bytes) -> "JsonState":
        """Return the state after more of the answer."""
        levels = list(self.levels)
        key = self.key
        in_text = self.in_text
        escaped = self.escaped
        is_value = self.is_value
        digits = self.digits
        breaks = False
        for byte in data:
            if byte in _DIGITS and not in_text:
                digits += 1
            else:
                digits = 0
            if in_text and (escaped or byte != _QUOTE):  # within a text
                escaped = byte == _ESCAPE and not escaped
                if key is not None:
                    key += bytes((byte,))
            elif in_text:  # its end
                in_text = False
                keys = levels[-1] if levels else None
                if key is not None and keys is not None:
                    breaks = breaks or key in keys or not _is_shortest(key)
                    levels[-1] = keys | {key}
                key = None
            elif byte == _QUOTE:
                in_text = True
                if not is_value:
                    key = b""
            elif byte == _OPENING_OBJECT:
                is_value = False
                levels.append(frozenset())
            elif byte == _OPENING_LIST:
                is_value = True
                levels.append(None)
            elif byte in _CLOSING:
                del levels[-1:]
                is_value = True
            elif byte in _BETWEEN:
                is_value = byte == _COLON or not levels or levels[-1] is None
        breaks = breaks or (key is not None and not _is_shortest(key))
        return JsonState(tuple(levels), key, in_text, escaped, is_value, digits, breaks)

    @property
    def quotes_to_end_a_key(self) -> int:
        """The fewest quotes after which a key may have ended that comes again; 0 if none can."""
        if not any(self.levels):  # no open object has a key
            return 0
        if self.key is not None:  # its own end
            return 1
        if self.in_text:  # the end of a value, and both quotes of a key
            return 3
        return 2

    @property
    def is_within_an_escape(self) -> bool:
        """True after the beginning of an escape in a key."""
        if self.key is None:
            return False
        match = _SHORTEST.fullmatch(self.key)
        return match is not None and bool(match[1])


def _is_shortest(key: bytes) -> bool:
    """Return whether a key, or its beginning, has no needless escape."""
    return b"\\" not in key or _SHORTEST.fullmatch(key) is not None


class JsonTokens:
    """A vocabulary, by the bytes of its tokens. JSON begins with the answer."""

    _begins: int | None = None  # a token after which it begins instead
    _first = JsonState()

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self._tokens = tokens
        # Tokens by their bytes, so that `narrow` scans only those that may break a rule.
        self._starts_with_digit = np.array([token[:1].isdigit() for token in tokens])
        counts = np.array([token.count(_QUOTE) for token in tokens])
        self._quoting = {least: np.flatnonzero(counts >= least) for least in (1, 2, 3)}
        escaping = np.array([_ESCAPE in token for token in tokens])
        goes_on = np.array([token[:1] != b"" and token[0] in _MAY_GO_ON_AN_ESCAPE for token in tokens])
        self._escaping = np.flatnonzero(escaping)
        self._opening_and_escaping = np.flatnonzero(escaping & (counts > 0))
        self._in_escape = np.flatnonzero(escaping | goes_on)

    def beginning_behind(self, token: int) -> "JsonTokens":
        """Return the same vocabulary for answers in which JSON begins after a token."""
        other = copy(self)
        other._begins = token
        return other

    def after_text(self, text: str) -> "JsonTokens":
        """Return the same vocabulary for answers that go on from a text."""
        other = copy(self)
        other._first = JsonState().after(text.encode())
        return other

    def start(self) -> JsonState | None:
        """Return the state before an answer; None before its JSON."""
        if self._begins is not None:
            return None
        return self._first

    def after(self, state: JsonState | None, tokens: Iterable[int]) -> JsonState | None:
        """Return the state after more tokens."""
        for token in tokens:
            if token == self._begins:
                state = JsonState()
            elif state is not None and token < len(self._tokens):
                state = state.after(self._tokens[token])
        return state

    def narrow(self, row: ByteFlags, state: JsonState | None) -> ByteFlags:
        """Return the allowed tokens (V,) without those that break a rule of the module, unless no others are left."""
        if state is None:
            return row
        narrowed = row.copy()
        if state.digits >= MOST_DIGITS:
            narrowed &= ~self._starts_with_digit
        for candidates in self._may_break(state):
            allowed = candidates[narrowed[candidates]]
            narrowed[[index for index in allowed if state.after(self._tokens[int(index)]).breaks]] = False
        if not narrowed.any():
            return row
        return narrowed

    def _may_break(self, state: JsonState) -> list[IndexArray]:
        """Return tokens, by their index, that may repeat a key or escape one of its characters without need."""
        if state.key is None:
            candidates = [self._opening_and_escaping]
        elif state.is_within_an_escape:
            candidates = [self._in_escape]
        else:
            candidates = [self._escaping]
        least = state.quotes_to_end_a_key
        if least > 0:
            candidates.append(self._quoting[least])
        return candidates
