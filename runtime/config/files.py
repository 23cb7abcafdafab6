"""Files of settings and measurements: read only if regular, replaced whole, flushed to the disk.

Others may have put a pipe or a device in the place of a file: the one would block, the other never end. After a crash
or a power cut a replaced file has the old text or the new. The text is first written to .NAME.headrace-PID in the same
folder; leftovers of killed processes are removed by the next write.

Cache files are small JSON files of measurements and hashes. A broken one reads as empty, failed writes are ignored, and
a folder of them keeps the most recently used.

Everything that may be written by another program, or cut by a power failure, goes through here: settings, stored
measurements, indexes of files. tests/runtime/config/test_files.py and `python -m tests.fuzz.kills` interrupt writers.
"""

import contextlib
import errno
import json
import os
import re
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

DISK_FULL = frozenset([errno.ENOSPC, errno.EDQUOT])
"""Error numbers of a disk, or a quota on it, without room."""
_MIB = 1 << 20
_MAX_CACHE_BYTES = 64 << 20  # of a cache file that is read: far above those in use
_LEFT_S = 60.0  # least age of a leftover: its process may run in another container, where its number means nothing


def open_regular(path: Path, max_bytes: int) -> BinaryIO:
    """Open a file to read. Raises OSError, and ValueError unless it is a regular one of at most `max_bytes`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe without a writer would block
    status = os.fstat(descriptor)
    is_regular = stat.S_ISREG(status.st_mode)
    if is_regular and status.st_size <= max_bytes:
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)  # `fdopen` raises for a folder, and would leave the descriptor open
    if is_regular:
        raise ValueError(f"it is larger than {max_bytes // _MIB} MiB")
    raise ValueError("it is not a regular file")


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Return the content of a file, and raise as `open_regular` does."""
    with open_regular(path, max_bytes) as opened:
        return opened.read(os.fstat(opened.fileno()).st_size)  # a buffer of that size, not of the largest


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


def read_cache(path: Path) -> dict[str, Any]:
    """Return the object in `path`; empty if there is no valid one."""
    try:
        stored = json.loads(read_regular(path, _MAX_CACHE_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return stored if isinstance(stored, dict) else {}


def touch_cache(path: Path, max_files: int) -> None:
    """Mark a file of measurements as used, and delete the least recently used JSON files of its folder beyond a count.

    path: a file of one model; it may not exist yet.
    max_files: how many files of the folder stay, this one included.
    """
    with contextlib.suppress(OSError):
        if path.exists():
            os.utime(path)
        others = [(file.stat().st_mtime_ns, file) for file in path.parent.glob("*.json") if file != path]
        for _, file in sorted(others, reverse=True)[max_files - 1 :]:
            file.unlink(missing_ok=True)


def write_cache(path: Path, content: Mapping[str, object]) -> None:
    """Replace the file atomically, creating its folder."""
    with contextlib.suppress(OSError):
        replace_file(path, json.dumps(content, indent=2) + "\n")


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
    ours = re.compile(re.escape(f".{path.name}.headrace-") + "([1-9][0-9]{0,9})")  # `.settings.toml.headrace-4711`
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
