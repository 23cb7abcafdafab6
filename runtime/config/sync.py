"""Flushing of files and folders to the disk, so that they survive a power cut."""

import os
from pathlib import Path


def sync_file(descriptor: int) -> None:
    """Flush a file or folder to the disk. Raises OSError.

    On macOS fsync leaves data in the drive's cache; F_FULLFSYNC flushes that too.
    """
    import fcntl

    full = getattr(fcntl, "F_FULLFSYNC", None)  # macOS only
    if full is not None:
        try:
            fcntl.fcntl(descriptor, full)
            return
        except OSError:  # not supported, such as on network volumes
            pass
    os.fsync(descriptor)


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to the disk, after files were made, renamed or deleted. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync_file(descriptor)
    finally:
        os.close(descriptor)
