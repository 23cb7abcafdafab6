"""Reading what the command line names, never without an end: a device or a stream may have none."""

import sys
from contextlib import nullcontext
from pathlib import Path

from headrace.runtime.errors import UsageError
from headrace.runtime.metrics.units import format_bytes

PROMPT = 64 << 20  # bytes: more than the longest contexts hold
DOCUMENT = 1 << 30
_AT_ONCE = 1 << 20


def read_bounded(source: Path | None, most: int) -> bytes:
    """A file, or standard input (None), to its end. Raises UsageError where that fails, or over `most` bytes."""
    name = "standard input" if source is None else str(source)
    try:
        with nullcontext(sys.stdin.buffer) if source is None else source.open("rb") as file:
            pieces, left = [], most
            while left >= 0 and (piece := file.read(_AT_ONCE)):
                pieces.append(piece)
                left -= len(piece)
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}") from None
    except ValueError:  # a NUL, which no path has
        raise UsageError(f"{name} cannot be read: no such file") from None
    if left < 0:
        raise UsageError(f"{name} has more than {format_bytes(most)}, the most that is read")
    return b"".join(pieces)
