"""Names of GGUF models, whole or split: NAME-00001-of-00003.gguf and the rest of its set, as llama.cpp writes them.

Guard: tests/models/gguf/test_split.py.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from headrace.runtime.errors import CheckpointError

_PART = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$)", re.IGNORECASE)  # "-00001-of-00003" before ".gguf"
_MOST_PARTS = 1024  # names are listed for each
_TOGETHER = "fetch it, and put all parts into one folder"


def is_gguf(name: str) -> bool:
    """Return whether a file name is that of a GGUF model, not of a vision or audio part next to one."""
    return name.lower().endswith(".gguf") and "mmproj" not in name.lower()


def part_names(name: str) -> list[str]:
    """Return the file names of the set that `name` belongs to, in order; `name` alone for a whole file."""
    match = _PART.search(name)
    if match is None or not 1 <= int(match[1]) <= int(match[2]) <= _MOST_PARTS:
        return [name]
    return [_PART.sub(f"-{number:05d}-of-{match[2]}", name) for number in range(1, int(match[2]) + 1)]


def parts_of(path: Path) -> list[Path]:
    """Return the paths of the set that `path` belongs to, in order."""
    return [path.with_name(name) for name in part_names(path.name)]


def present_parts(path: Path) -> list[Path]:
    """Return the paths of the set that `path` belongs to. Raises CheckpointError if only some of them exist."""
    parts = parts_of(path)
    missing = [part.name for part in parts if not part.exists()]
    if 0 < len(missing) < len(parts):
        raise CheckpointError(f"{whole_name(path.name)} has {len(parts)} parts, and {missing[0]} is missing", _TOGETHER)
    return parts


def whole_name(name: str) -> str:
    """Return a file's name without the number of its part."""
    return _PART.sub("", name)


def first_parts(names: Iterable[str]) -> list[str]:
    """Return the names without later parts of a set."""
    return [name for name in names if part_names(name)[0] == name]
