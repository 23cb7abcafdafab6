"""Files of a folder or of a pattern such as `src/*.py` or `docs/**/*.md`."""

import glob
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

MAX_FILES = 100
_MAX_ENTRIES = 20_000  # searched in a folder


def is_file_group(name: str) -> bool:
    """True if this is an existing folder, or a pattern that matches a file; an existing file is neither."""
    try:
        path = Path(name).expanduser()
        return not path.is_file() and (path.is_dir() or next(_fitting(path), None) is not None)
    except (OSError, RuntimeError, ValueError):
        return False


def files_of(name: str) -> list[str] | None:
    """Return the sorted files, without hidden ones, at most MAX_FILES + 1; None for anything but a folder or pattern.

    The paths begin as `name` does.
    """
    try:
        path = Path(name).expanduser()
        if path.is_file():
            return None
        folder = path.is_dir()
        found = sorted(islice(_below(path) if folder else _fitting(path), MAX_FILES + 1))
    except (OSError, RuntimeError, ValueError):
        return None
    return found if found or folder else None


def _fitting(pattern: Path) -> Iterator[str]:
    if not glob.has_magic(str(pattern)):
        return
    for name in islice(glob.iglob(str(pattern), recursive=True), _MAX_ENTRIES):  # noqa: PTH207 - absolute or not
        if Path(name).is_file():
            yield name


def _below(folder: Path) -> Iterator[str]:
    seen = 0
    for at, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if not name.startswith("."):
                yield str(Path(at) / name)
        seen += len(files) + len(folders)
        if seen > _MAX_ENTRIES:
            return
