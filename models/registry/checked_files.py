"""Results of integrity checks, cached by path, size, modification time and inode for RECHECK_DAYS."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from headrace.models.registry.checksums import FileRecord
from headrace.runtime.config.files import read_cache, write_cache
from headrace.runtime.config.paths import cache_dir

RECHECK_DAYS = 30
_DAY = "%Y-%m-%d"


def recall_checked(file: Path, entry: FileRecord) -> str | None:
    """Return the cached result for this file: a problem, "" for none; None if there is no recent one."""
    checked = _checked().get(str(file))
    oldest = (datetime.now(UTC) - timedelta(days=RECHECK_DAYS)).strftime(_DAY)
    if (
        not isinstance(checked, dict)
        or checked.get("file") != _identity(file)
        or checked.get("sha256") != entry["sha256"]
    ):
        return None
    problem = checked.get("problem")
    day = checked.get("day")
    if not isinstance(problem, str) or not isinstance(day, str):
        return None
    is_recent = day >= oldest
    return problem if problem or is_recent else None


def note_checked(file: Path, entry: FileRecord, problems: list[str]) -> None:
    """Cache the result for a file that could be read; entries of deleted files are dropped."""
    identity = _identity(file)
    if identity is None or identity[0] != entry["bytes"] or any("cannot be read" in problem for problem in problems):
        return
    day = datetime.now(UTC).strftime(_DAY)
    new = {"file": identity, "sha256": entry["sha256"], "problem": "; ".join(problems), "day": day}
    others = {path: checked for path, checked in _checked().items() if Path(path).exists()}
    write_cache(_cache_file(), {"files": {**others, str(file): new}})


def _checked() -> dict[str, object]:
    files = read_cache(_cache_file()).get("files")
    return files if isinstance(files, dict) else {}


def _identity(file: Path) -> list[int] | None:
    try:
        facts = file.stat()
    except OSError:
        return None
    return [facts.st_size, facts.st_mtime_ns, facts.st_ino]


def _cache_file() -> Path:
    return cache_dir() / "checked.json"
