"""File locks: one process at a time reads, changes and replaces a settings file.

Settings and presets change under it. The lock is a file next to theirs, .NAME.lock. It is never deleted, since another
process may wait for it. Reading needs no lock, since files are replaced whole.

Guard: tests/app/config/test_file_lock.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.runtime.errors import HeadraceError

PATIENCE_S = 5.0  # a change takes milliseconds: a process that holds the lock for longer was stopped
_POLL_S = 0.01


@contextmanager
def alone_with(path: Path) -> Iterator[None]:
    """Hold the file's lock within the block; may be nested. Its folder is created if need be.

    Raises HeadraceError if another process keeps the lock, or if the lock file cannot be written.
    """
    import filelock  # imported late: 20 ms that reading does not need

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(path.with_name(f".{path.name}.lock"), is_singleton=True)
        lock.acquire(timeout=PATIENCE_S, poll_interval=_POLL_S)
    except filelock.Timeout:
        raise HeadraceError(
            f"{path} is being changed by another headrace process",
            "nothing was changed; try again once that process is done",
        ) from None
    except OSError as error:
        raise HeadraceError(f"{path} cannot be written: {error.strerror or error}") from None
    try:
        yield
    finally:
        lock.release()
