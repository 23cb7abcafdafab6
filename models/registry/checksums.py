"""Checksums of installed models: recorded at installation, compared with the files when somebody asks.

headrace.json keeps as "files" what a model consists of: {name: {"bytes": size, "sha256": digest}}, names relative to
the folder its weights are in. Sizes are compared in no time; contents by reading everything again.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.models.checkpoint.safetensors import ORIGIN_FILE
from headrace.models.registry.progress import Progress, silent

Files = dict[str, dict[str, Any]]

_CHUNK = 4 << 20


def checksums(
    folder: Path,
    names: Iterable[str] | None = None,
    *,
    known: Mapping[str, str] | None = None,
    progress: Progress = silent,
) -> Files:
    """Size and sha256 of the files `names` below `folder` (None: all but headrace.json).

    known: digests that need not be computed, by name. Raises OSError for a file that cannot be read.
    """
    known = known or {}
    found = names if names is not None else _below(folder)
    sizes = {name: (folder / name).stat().st_size for name in found}
    count = _Count(progress, sum(size for name, size in sizes.items() if name not in known))
    return {
        name: {"bytes": size, "sha256": known.get(name) or _sha256(folder / name, count)}
        for name, size in sizes.items()
    }


def size_problems(folder: Path, recorded: Files) -> list[str]:
    """What the sizes alone say: files that are gone, cut off or grown."""
    found = (_size_problem(folder, name, entry) for name, entry in recorded.items())
    return [problem for problem in found if problem]


def content_problems(folder: Path, recorded: Files, progress: Progress = silent) -> list[str]:
    """What reading every file again says; a file of another size is not read."""
    count = _Count(progress, sum(entry["bytes"] for entry in recorded.values()))
    problems = []
    for name, entry in recorded.items():
        problem = _size_problem(folder, name, entry)
        try:
            if not problem and _sha256(folder / name, count) != entry["sha256"]:
                problem = f"{name} is not what was installed: its sha256 differs"
        except OSError as error:
            problem = f"{name} cannot be read: {error.strerror}"
        problems += [problem] if problem else []
    return problems


def recorded_files(origin: Mapping[str, Any]) -> Files | None:
    """The checksums in a headrace.json; None for a model that was installed before there were any."""
    files = origin.get("files")
    if not isinstance(files, dict) or not files:
        return None
    for entry in files.values():
        if not (isinstance(entry, dict) and isinstance(entry.get("bytes"), int) and entry.get("sha256")):
            return None
    return files


def _size_problem(folder: Path, name: str, entry: Mapping[str, Any]) -> str | None:
    try:
        size = (folder / name).stat().st_size
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    if size == entry["bytes"]:
        return None
    return f"{name} has {size:,} bytes, not the {entry['bytes']:,} it was installed with"


class _Count:
    """Bytes read so far, of all files together."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        self._progress("hashing", self._done, self._total)


def _sha256(file: Path, count: _Count) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            count.add(len(chunk))
    return digest.hexdigest()


def _below(folder: Path) -> Sequence[str]:
    files = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    return [name for name in files if name != ORIGIN_FILE]
