"""Completing a path while it is typed after `@` or `/file `. Reads one directory, nothing else."""

import os
import re
from pathlib import Path

_LIMIT = 200  # entries of a directory that are looked at
_AT = re.compile(r"(?:^|\s)@(\S*)$")
_FILE = re.compile(r"^/file\s+(.*)$")


def typed_path(before_cursor: str) -> str | None:
    """The unfinished path before the cursor, None where none is being typed."""
    match = _FILE.match(before_cursor) or _AT.search(before_cursor)
    return match[1] if match else None


def completions(typed: str, limit: int = 8) -> list[str]:
    """Paths that continue `typed`, directories with a slash at the end, hidden files only when asked for."""
    head, tail = os.path.split(typed)
    folder = Path(head or ".").expanduser()
    found: list[tuple[bool, str]] = []
    try:
        with os.scandir(folder) as entries:
            for _, entry in zip(range(_LIMIT), entries, strict=False):
                if not entry.name.startswith(tail) or (entry.name.startswith(".") and not tail.startswith(".")):
                    continue
                if not entry.name.isprintable():
                    continue
                is_folder = entry.is_dir()
                found.append((not is_folder, os.path.join(head, entry.name) + ("/" if is_folder else "")))  # noqa: PTH118
    except OSError:
        return []
    return [name for _, name in sorted(found)[:limit]]
