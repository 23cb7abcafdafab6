"""Atomic file replacement: after a crash or a power cut a file has the old text or the new.

The text is first written to .NAME.headrace-PID in the same folder. Leftovers of killed processes are removed by the
next write.
"""

import contextlib
import os
import re
import stat
import time
from pathlib import Path

from headrace.runtime.config.sync import sync_file, sync_folder

_LEFT_S = 60.0  # least age of a leftover: its process may be in another container


def replace_file(path: Path, text: str) -> None:
    """Replace a file by `text` in UTF-8, creating its folder. Links and permissions stay. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path = Path(os.path.realpath(path))  # the target of a link
    partial = path.with_name(f".{path.name}.headrace-{os.getpid()}")
    try:
        with os.fdopen(_create(partial, _mode_of(path)), "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            sync_file(file.fileno())  # before the rename: a power cut would leave an empty file
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):
        sync_folder(path.parent)  # not supported by some file systems; either name is a whole file
    with contextlib.suppress(OSError):
        _remove_leftovers(path)


def _create(partial: Path, old: int | None) -> int:
    """Create the partial file. old: permissions of the file that it replaces, which it never exceeds.

    A link or a leftover of that name is removed, never followed.
    """
    with contextlib.suppress(FileNotFoundError):
        partial.unlink()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(partial, flags, 0o666 if old is None else 0o600)
    if old is not None:
        with contextlib.suppress(OSError):  # a file system without permissions
            os.fchmod(descriptor, old)
    return descriptor


def _mode_of(path: Path) -> int | None:
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except OSError:  # a new file
        return None


def _remove_leftovers(path: Path) -> None:
    """Remove partial files of killed processes."""
    ours = re.compile(re.escape(f".{path.name}.headrace-") + "([1-9][0-9]{0,9})")
    for other in path.parent.iterdir():
        named = ours.fullmatch(other.name)
        if named and not _runs(int(named[1])) and time.time() - other.lstat().st_mtime > _LEFT_S:
            other.unlink()


def _runs(process: int) -> bool:
    """Return whether a process of this id exists; True if unknown."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass
    return True
