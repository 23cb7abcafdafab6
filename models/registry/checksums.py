"""Checksums of installed models: recorded at installation, verified on request and in the background.

headrace.json stores them as "files": {name: {"bytes": size, "sha256": digest}}, with names relative to the folder of
the weights. Results of checks are cached by path, size, modification time and inode (`note_checked`).

Guards: tests/models/registry/test_background_check.py and test_resolve.py; tests/app/cli/test_batch.py for a model
that changes under a batch.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypedDict

from headrace.models.checkpoint.gguf_link import file_facts
from headrace.models.checkpoint.safetensors import ORIGIN_FILE
from headrace.models.registry.progress import Progress, silent
from headrace.runtime.config.files import read_cache, write_cache
from headrace.runtime.config.paths import cache_dir


class FileRecord(TypedDict):
    """Size and digest of one file."""

    bytes: int
    sha256: str


Files = dict[str, FileRecord]

RECHECK_DAYS = 30  # a check reads all weights, so it is rare; a cached result without a problem counts that long
_DAY = "%Y-%m-%d"
_UNREADABLE = "cannot be read"  # in a problem that may pass, so `note_checked` caches none with it
_CHUNK = 4 << 20  # bytes that are read at a time
_MODEL_SUFFIXES = frozenset({".safetensors", ".json", ".jinja", ".model", ".gguf"})


def checksums(
    folder: Path,
    names: Iterable[str] | None = None,
    *,
    known: Mapping[str, str] | None = None,
    progress: Progress = silent,
) -> Files:
    """Return size and sha256 of the files `names` below `folder` (None: all but headrace.json).

    known: sha256 digests by name, which are not computed again. Raises OSError for an unreadable file.
    """
    known = known or {}
    paths = names if names is not None else _below(folder)
    sizes = {name: (folder / name).stat().st_size for name in paths}
    count = ByteProgress(progress, "hashing", sum(size for name, size in sizes.items() if name not in known))
    return {
        name: {"bytes": size, "sha256": known.get(name) or hash_file(folder / name, count)}
        for name, size in sizes.items()
    }


def size_problems(folder: Path, recorded: Files) -> list[str]:
    """Return problems visible from sizes alone: missing, truncated or grown files."""
    problems = (_size_problem(folder, name, entry) for name, entry in recorded.items())
    return [problem for problem in problems if problem]


def content_problems(folder: Path, recorded: Files, progress: Progress = silent) -> list[str]:
    """Return the problems found by reading every file; a file of another size is not read."""
    count = ByteProgress(progress, "hashing", sum(entry["bytes"] for entry in recorded.values()))
    problems = []
    for name, entry in recorded.items():
        problem = _size_problem(folder, name, entry)
        try:
            if not problem and hash_file(folder / name, count) != entry["sha256"]:
                problem = f"{name} has changed since it was installed: its sha256 differs"
        except OSError as error:
            problem = f"{name} {_UNREADABLE}: {error.strerror}"
        if problem:
            problems.append(problem)
    return problems


def recorded_files(origin: Mapping[str, object]) -> Files | None:
    """Return the checksums in a headrace.json; None for a model installed without them."""
    files = origin.get("files")
    if not isinstance(files, dict) or not files:
        return None
    for entry in files.values():
        if not (isinstance(entry, dict) and isinstance(entry.get("bytes"), int) and entry.get("sha256")):
            return None
    return files


def files_identity(folder: Path, origin: Mapping[str, object]) -> dict[str, object]:
    """Return the identity of a model's files, which changes if others replace them: digests, or sizes and times.

    origin: headrace.json, with digests if the model was installed with them. Raises OSError.
    """
    recorded = recorded_files(origin)
    if recorded is not None:
        return {name: entry["sha256"] for name, entry in recorded.items()}
    return {
        file.name: file_facts(file)
        for file in sorted(folder.iterdir())
        if file.suffix in _MODEL_SUFFIXES and file.is_file()
    }


def _size_problem(folder: Path, name: str, entry: FileRecord) -> str | None:
    """Return the problem of a file that is missing or has another size; None if it has none."""
    try:
        size = (folder / name).stat().st_size
    except OSError as error:
        return f"{name} {_UNREADABLE}: {error.strerror}"
    if size == entry["bytes"]:
        return None
    return f"{name} has {size:,} bytes, not the {entry['bytes']:,} it was installed with"


class ByteProgress:
    """Progress of one stage over the bytes of several files."""

    def __init__(self, progress: Progress, stage: str, total: int) -> None:
        self._progress = progress
        self._stage = stage
        self._total = total
        self._done = 0

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        self._progress(self._stage, self._done, self._total)


def hash_file(file: Path, progress: ByteProgress, digest: "hashlib._Hash | None" = None) -> str:
    """Return the hexadecimal digest of a file: sha256, unless another `digest` is given."""
    digest = digest or hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            progress.add(len(chunk))
    return digest.hexdigest()


def _below(folder: Path) -> Sequence[str]:
    """Return the names of all files below a folder, relative to it, but for headrace.json."""
    files = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    return [name for name in files if name != ORIGIN_FILE]


def recall_checked(file: Path, entry: FileRecord) -> str | None:
    """Return the cached result for this file: a problem, "" for none; None if there is no recent one.

    A problem stays until the file is another one, whatever its age.
    """
    checked = _cached_results().get(str(file))
    oldest = (datetime.now(UTC) - timedelta(days=RECHECK_DAYS)).strftime(_DAY)
    if (
        not isinstance(checked, dict)
        or checked.get("file") != _file_state(file)
        or checked.get("sha256") != entry["sha256"]
    ):
        return None
    problem = checked.get("problem")
    day = checked.get("day")
    if not isinstance(problem, str) or not isinstance(day, str):
        return None
    if not problem and day < oldest:
        return None
    return problem


def note_checked(file: Path, entry: FileRecord, problems: list[str]) -> None:
    """Cache the result for a file that could be read; entries of deleted files are dropped."""
    identity = _file_state(file)
    if identity is None or any(_UNREADABLE in problem for problem in problems):
        return
    size, *_ = identity
    if size != entry["bytes"]:  # `size_problems` sees that at once, each time
        return
    day = datetime.now(UTC).strftime(_DAY)
    new = {"file": identity, "sha256": entry["sha256"], "problem": "; ".join(problems), "day": day}
    others = {path: checked for path, checked in _cached_results().items() if Path(path).exists()}
    write_cache(_cache_file(), {"files": {**others, str(file): new}})


def _cached_results() -> dict[str, object]:
    """Return the entries of `note_checked` by path."""
    files = read_cache(_cache_file()).get("files")
    return files if isinstance(files, dict) else {}


def _file_state(file: Path) -> list[int] | None:
    """Return size, modification time and inode, a list as in the cache's JSON; None for a missing file."""
    try:
        facts = file.stat()
    except OSError:
        return None
    return [facts.st_size, facts.st_mtime_ns, facts.st_ino]


def _cache_file() -> Path:
    return cache_dir() / "checked.json"
