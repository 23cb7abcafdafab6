"""Bounded reads of files that the command line names; a device or a stream may have no end.

Prompts, batches, grammars, bench documents and attachments are decoded here, bodies of requests and lines of batches
parsed, so that wrong bytes have one error.

Guard: tests/app/config/test_bounded_input.py.
"""

import codecs
import json
import sys
from contextlib import nullcontext
from io import BufferedReader
from pathlib import Path
from typing import NoReturn, cast

from headrace.models.checkpoint.side_file import unique_keys
from headrace.runtime.config.value_types import shown
from headrace.runtime.errors import UsageError
from headrace.runtime.metrics.units import format_bytes

# Limits in bytes.
PROMPT = 64 << 20  # more than the longest contexts hold
DOCUMENT = 1 << 30  # requests of `batch`, results of `bench`
_AT_ONCE = 1 << 20  # bytes of one read


def read_bounded(source: Path | None, limit: int) -> bytes:
    """Read a file, or standard input (None), to its end. Raises UsageError on failure, or above `limit` bytes."""
    name = "standard input" if source is None else str(source)
    try:
        with nullcontext(cast(BufferedReader, sys.stdin.buffer)) if source is None else source.open("rb") as file:
            pieces = []
            remaining = limit  # below zero: the file is longer than the limit
            while remaining >= 0:
                piece = file.read1(_AT_ONCE)  # `read` asks a terminal again after its end
                if not piece:
                    break
                pieces.append(piece)
                remaining -= len(piece)
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}") from None
    except ValueError:  # a NUL in the path
        raise UsageError(f"{name} cannot be read: no such file") from None
    if remaining < 0:
        raise UsageError(f"{name} has more than {format_bytes(limit)}, the most that is read")
    return b"".join(pieces)


def without_mark(data: bytes, name: str) -> bytes:
    """Return bytes of UTF-8 text without the byte order mark. name: of their source. Raises UsageError for UTF-16."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UsageError(f"{name} is UTF-16, not UTF-8 text", "iconv -f UTF-16 -t UTF-8 converts it")
    return data.removeprefix(codecs.BOM_UTF8)


def decoded(data: bytes, name: str) -> str:
    """Return UTF-8 text without its byte order mark. name: of its source. Raises UsageError for other bytes."""
    try:
        return without_mark(data, name).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not UTF-8 text (byte {error.start})") from None


def json_object(data: bytes, name: str, *, unique: bool = False) -> dict[str, object]:
    """Return the JSON object in UTF-8 text. Raises UsageError for anything else, with `name` in its message.

    unique: refuse a repeated key, of whose values parsers take different ones.
    """
    try:
        hook = unique_keys if unique else None
        value = json.loads(decoded(data, name), object_pairs_hook=hook, parse_constant=_refuse_constant)
    except RecursionError:
        raise UsageError(f"{name} is nested too deeply") from None
    except json.JSONDecodeError as error:
        place = f"character {error.pos + 1}"
        if b"\n" in data.strip():
            place = f"line {error.lineno}, column {error.colno}"
        raise UsageError(f"{name} is not JSON: {error.msg} at {place}") from None
    except ValueError as error:  # a repeated key, NaN, a number of thousands of digits
        reason = str(error)
        if reason.startswith("Exceeds the limit"):  # of digits; Python's text says how to allow more
            reason = "a number is too long"
        raise UsageError(f"{name} is not JSON: {reason}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{name} must be a JSON object, not {shown(value)}")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def is_schema(text: str) -> bool:
    """Return whether a text is a JSON schema itself, and not the name of its file."""
    return text.lstrip().startswith("{") or text in ("object", "true", "false")


def read_grammar_file(name: str) -> str:
    """Return the text of a file with a JSON schema or a grammar. Raises UsageError."""
    from headrace.models.text.structured.grammar_source import MAX_BYTES  # late: other files need no schemas

    try:
        path = Path(name).expanduser()
    except (RuntimeError, ValueError):  # an unknown ~user, a NUL
        raise UsageError(f"{name} cannot be read: no such file") from None
    return decoded(read_bounded(path, MAX_BYTES), name)
