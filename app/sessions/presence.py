"""Locks on open sessions, to detect a session open in two processes: one byte of a lock file per session.

The kernel releases the locks of a process that ends. Locks belong to processes: two instances in one process do not
conflict.

Guard: tests/app/sessions/test_presence.py.
"""

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from time import sleep
from zlib import crc32

_TRIES = 10  # for the shared lock, 1 ms apart: another process has the exclusive one for microseconds


class Presence:
    """Locks one session at a time. Without a writable lock file no session counts as shared."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        self._offset: int | None = None  # offset of the locked byte

    def open(self, session_id: str) -> bool:
        """Lock this session instead of the one before; return whether another process has it open, too."""
        offset = crc32(session_id.encode()) & 0x7FFFFFFF  # within the range every file system can lock
        try:
            if self._file is None:
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
            if self._offset not in (None, offset):
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self._offset)
            self._offset = offset
            # An exclusive lock is granted only if no other process has a lock there. Then all share it.
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, offset)
                alone = True
            except OSError:
                alone = False
            self._share(self._file, offset)
        except OSError:
            return False
        return not alone

    def _share(self, file: int, offset: int) -> None:
        """Take the shared lock, or none if another process has the exclusive one all the time."""
        for _ in range(_TRIES):
            try:
                fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, offset)
            except BlockingIOError:
                sleep(0.001)
            else:
                return

    def close(self) -> None:
        """Release the lock."""
        if self._file is not None:
            with suppress(OSError):
                os.close(self._file)
            self._file = self._offset = None
