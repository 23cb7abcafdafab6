"""Waiting until what was written survives a power cut."""

import os
from pathlib import Path


def to_disk(descriptor: int) -> None:
    """Have what was written to the file or folder on the medium itself. Raises OSError.

    On macOS fsync hands it to the drive, which may keep it in a cache for long; F_FULLFSYNC empties that too.
    """
    import fcntl

    full = getattr(fcntl, "F_FULLFSYNC", None)  # macOS alone has it
    if full is not None:
        try:
            fcntl.fcntl(descriptor, full)
            return
        except OSError:  # a file system that has no such thing: network volumes
            pass
    os.fsync(descriptor)


def folder_to_disk(path: Path) -> None:
    """Have a folder's names on the medium: of files that were made, renamed or deleted in it. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        to_disk(descriptor)
    finally:
        os.close(descriptor)
