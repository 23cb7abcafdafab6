"""JSON values at the beginning of a text that may still be growing."""

import json
from typing import Any


class UnfinishedError(Exception):
    """The text may become a JSON value."""


def leading_value(text: str, start: int = 0) -> tuple[Any, int]:
    """Return the object or list that begins at `start`, behind spaces, and the place behind it.

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
    """Return the place behind the bracket that closes the one at `start`. Raises UnfinishedError before it has come."""
    depth, quoted, escaped = 0, False, False
    for place in range(start, len(text)):
        char = text[place]
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
                return place + 1
    raise UnfinishedError
