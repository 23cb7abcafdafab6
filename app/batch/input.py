"""The lines of the input, read whole: how many there are, and which were answered before, is known before the first."""

import sys
from pathlib import Path

from headrace.runtime.errors import UsageError

STDIN = "-"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_lines(source: str | None) -> list[bytes]:
    """Of the file `source`, or of standard input (`-`, or None where something is piped in). Raises UsageError."""
    if source is None and sys.stdin.isatty():
        raise UsageError("no requests", "headrace batch IN.jsonl, or pipe lines in")
    try:
        data = sys.stdin.buffer.read() if source in (None, STDIN) else Path(source).read_bytes()
    except OSError as error:
        raise UsageError(f"{source or 'standard input'} cannot be read: {error.strerror}") from None
    return data.removeprefix(_BYTE_ORDER_MARK).split(b"\n")
