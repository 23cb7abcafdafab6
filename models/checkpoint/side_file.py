"""Reading of a small untrusted file that accompanies the weights.

Only regular files up to a size limit are read: a path can name a pipe, an endless device or a huge sparse file.
"""

import os
import stat
from pathlib import Path

MAX_TOKENIZER_BYTES = 64 << 20  # the largest tokenizer.json files in use have 35 MB
MAX_TOKENIZER_PARTS = 4_000_000  # and 2 million values
_MIB = 1 << 20


def read_side_file(file: Path, max_bytes: int) -> bytes:
    """Return the content of `file`. Raises OSError, or ValueError unless it is a regular file up to `max_bytes`."""
    # O_NONBLOCK: opening a pipe without a writer would block.
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as opened:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is not a regular file")
        if found.st_size > max_bytes:
            raise ValueError(f"it is larger than {max_bytes // _MIB} MiB")
        return opened.read(found.st_size)


def check_parts(content: bytes, max_parts: int) -> None:
    """Raise ValueError for JSON of more than `max_parts` values, before a parser creates objects for them.

    The count of commas and brackets, including those in strings, is an upper bound.
    """
    if len(content) > max_parts and sum(map(content.count, (b",", b"[", b"{"))) > max_parts:
        raise ValueError(f"it has more than {max_parts} values")
