"""Several files by one name: a folder with all text in it, or a pattern such as `src/*.py` or `docs/**/*.md`."""

import glob
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

MOST_FILES = 100
_LOOKED_AT = 20_000  # entries, after which a folder is too large to look through while someone waits


def is_several(name: str) -> bool:
    """Whether this names a folder that is there, or a pattern that fits some file. A file's own name comes first."""
    try:
        path = Path(name).expanduser()
        return not path.is_file() and (path.is_dir() or next(_fitting(path), None) is not None)
    except (OSError, RuntimeError, ValueError):
        return False


def files_of(name: str) -> list[str] | None:
    """The files, by name, as paths that begin as `name` does; nothing hidden. At most MOST_FILES + 1.

    None where this names no folder and no pattern that fits some file.
    """
    try:
        path = Path(name).expanduser()
        if path.is_file():
            return None
        folder = path.is_dir()
        found = sorted(islice(_below(path) if folder else _fitting(path), MOST_FILES + 1))
    except (OSError, RuntimeError, ValueError):
        return None
    return found if found or folder else None


def _fitting(pattern: Path) -> Iterator[str]:
    if not glob.has_magic(str(pattern)):
        return
    for name in islice(glob.iglob(str(pattern), recursive=True), _LOOKED_AT):  # noqa: PTH207 - absolute or not
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
        if seen > _LOOKED_AT:
            return
