"""Which sessions are open in which process: a byte of one file for each session, locked for as long as it is open.

The kernel takes a lock back when its process ends, however that happens, so nothing is left behind to be believed.
Locks belong to processes: two of these in one process do not see each other.
"""

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from zlib import crc32


class Presence:
    """Holds one session open at a time. Where the file cannot be written, nobody is seen and nothing is said."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        self._held: int | None = None

    def open(self, session_id: str) -> bool:
        """Hold this session open from now on, in the place of the one before; whether another process does, too."""
        place = crc32(session_id.encode()) & 0x7FFFFFFF  # within what every file system can lock
        try:
            if self._file is None:
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
            if self._held not in (None, place):
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self._held)
            self._held = place
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
                alone = True
            except OSError:
                alone = False
            fcntl.lockf(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, place)  # others may hold it, too
        except OSError:
            return False
        return not alone

    def close(self) -> None:
        """Hold nothing any more."""
        if self._file is not None:
            with suppress(OSError):
                os.close(self._file)
            self._file = self._held = None
