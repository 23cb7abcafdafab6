"""One process at a time changes a file that people's settings are in: read, changed and put back as one.

The lock is a file beside it, .NAME.lock, which stays: whoever deleted it could take it from somebody who waits. Reading
needs none, since a file is put in place whole.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.runtime.errors import HeadraceError

PATIENCE_S = 5.0  # a change takes milliseconds: whoever holds the lock for longer was stopped
_LOOK_AGAIN_S = 0.01


@contextmanager
def alone_with(path: Path) -> Iterator[None]:
    """Nobody else changes the file within; may be nested. Its folder is made if need be.

    Raises HeadraceError where somebody else does not let go of it, and where nothing can be written beside it.
    """
    import filelock  # 20 ms that reading needs not

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(path.with_name(f".{path.name}.lock"), is_singleton=True)
        lock.acquire(timeout=PATIENCE_S, poll_interval=_LOOK_AGAIN_S)
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
