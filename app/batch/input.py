"""The lines of the input, read whole: how many there are, and which were answered before, is known before the first."""

import sys
from pathlib import Path

from headrace.app.config.bounded_input import DOCUMENT, read_bounded
from headrace.runtime.errors import UsageError

STDIN = "-"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_lines(source: str | None) -> list[bytes]:
    """Of the file `source`, or of standard input (`-`, or None where something is piped in). Raises UsageError."""
    if source is None and sys.stdin.isatty():
        raise UsageError("no requests", "headrace batch IN.jsonl, or pipe lines in")
    data = read_bounded(None if source in (None, STDIN) else Path(str(source)), DOCUMENT)
    return data.removeprefix(_BYTE_ORDER_MARK).split(b"\n")
