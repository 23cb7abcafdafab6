"""JSON values at the beginning of a text that may still be growing.

The forms whose arguments are JSON read with these, `stream.CallDeltas` and `cut` with `Brackets` alone.

Guards: tests/models/text/tools/test_forms.py and test_round_trip.py.
"""

import json


class UnfinishedError(Exception):
    """The text may become a JSON value."""


def leading_value(text: str, start: int = 0) -> tuple[object, int]:
    """Return the object or list that begins at `start`, after spaces, and the position after it.

    Raises UnfinishedError, or ValueError for a text that begins otherwise.
    """
    while start < len(text) and text[start].isspace():
        start += 1
    if start == len(text):
        raise UnfinishedError
    if text[start] not in "{[":
        raise ValueError("no object or list")
    end = _closing(text, start)
    try:
        return json.loads(text[start:end]), end
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _closing(text: str, start: int) -> int:
    """Return the position after the bracket that closes the one at `start`. Raises UnfinishedError if it is missing."""
    brackets = Brackets(start)
    brackets.scan(text)
    if not brackets.closed:
        raise UnfinishedError
    return brackets.position


class Brackets:
    """Search for the end of the object or list that begins at `position`, in a text that grows.

    position: after the closing bracket if `closed`, else the end of the text so far.
    """

    def __init__(self, position: int) -> None:
        self.position = position
        self.closed = False
        self._depth = 0
        self._quoted = False
        self._escaped = False

    def scan(self, text: str) -> None:
        """Search on to the end of the text."""
        if self.closed:
            return
        depth = self._depth
        quoted = self._quoted
        escaped = self._escaped
        for position in range(self.position, len(text)):
            char = text[position]
            if quoted:
                quoted = escaped or char != '"'
                escaped = char == "\\" and not escaped
            elif char == '"':
                quoted = True
            elif char in "{[":
                depth += 1
            elif char in "}]":
                depth -= 1
                if not depth:
                    self.position = position + 1
                    self.closed = True
                    return
        self.position = len(text)
        self._depth = depth
        self._quoted = quoted
        self._escaped = escaped
