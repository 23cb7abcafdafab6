"""Reading of files that others may have put in place of ours: a pipe would block, a device never end."""

import os
import stat
from pathlib import Path
from typing import BinaryIO

_MIB = 1 << 20


def open_regular(path: Path, max_bytes: int) -> BinaryIO:
    """Open a file to read. Raises OSError, and ValueError unless it is a regular one of at most `max_bytes`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe without a writer would block
    opened = os.fdopen(descriptor, "rb")
    status = os.fstat(descriptor)
    is_regular = stat.S_ISREG(status.st_mode)
    if is_regular and status.st_size <= max_bytes:
        return opened
    opened.close()
    if is_regular:
        raise ValueError(f"it is larger than {max_bytes // _MIB} MiB")
    raise ValueError("it is not a regular file")


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Return the content of a file, and raise as `open_regular` does."""
    with open_regular(path, max_bytes) as opened:
        return opened.read(os.fstat(opened.fileno()).st_size)  # a buffer of that size, not of the largest
