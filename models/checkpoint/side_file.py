"""Reading a file that comes beside the weights, whole and as untrusted input: a regular file of bearable size.

What looks like a file can be a pipe that nobody writes to, a device without end or three gigabytes of nothing.
"""

import os
import stat
from pathlib import Path

MAX_TOKENIZER_BYTES = 64 << 20  # of a tokenizer.json: the largest vocabularies in use come to 35 MB
MAX_TOKENIZER_PARTS = 4_000_000  # and to 2 million: tokens, and merges of two parts each
_MIB = 1 << 20


def read_side_file(file: Path, most: int) -> bytes:
    """The content of `file`. Raises OSError, or ValueError for what is no regular file of up to `most` bytes."""
    # A pipe without a writer would keep an ordinary `open` waiting.
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as opened:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is not a regular file")
        if found.st_size > most:
            raise ValueError(f"it is larger than {most // _MIB} MiB")
        return opened.read(found.st_size)


def check_parts(content: bytes, most: int) -> None:
    """Raises ValueError for JSON of more than `most` values, before a parser makes objects of dozens of bytes each.

    Counted by what begins or follows one, in texts too.
    """
    if len(content) > most and sum(map(content.count, (b",", b"[", b"{"))) > most:
        raise ValueError(f"it has more than {most} values")
