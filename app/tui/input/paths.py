"""Completing a path while it is typed after `@` or `/file `, in quotes too. Reads one directory, nothing else."""

import os
import re
from pathlib import Path

_LIMIT = 200  # entries of a directory that are looked at
_AT = re.compile(r'(?:^|\s)@("[^"]*|[^\s"]*)$')
_FILE = re.compile(r'^/file[ \t]+("[^"]*|[^"]*)$')


def typed_path(before_cursor: str) -> str | None:
    """The unfinished path before the cursor, with the quote that it began with; None where none is being typed."""
    line = before_cursor.rpartition("\n")[2]
    match = _FILE.match(line) or _AT.search(line)
    return match[1] if match else None


def as_typed(path: str, typed: str) -> str:
    """How `path` is written where `typed` stands: quoted if that is or must be; open as long as more can follow."""
    quote = '"' if typed.startswith('"') or " " in path else ""
    return quote + path + ("" if path.endswith("/") else f"{quote} ")


def completions(typed: str, limit: int = 8) -> list[str]:
    """Paths that continue what `typed_path` gave: folders end with a slash, hidden files only when asked for."""
    head, tail = os.path.split(typed.removeprefix('"'))
    found: list[tuple[bool, str]] = []
    try:
        folder = Path(head or ".").expanduser()
        with os.scandir(folder) as entries:
            for _, entry in zip(range(_LIMIT), entries, strict=False):
                if not entry.name.startswith(tail) or (entry.name.startswith(".") and not tail.startswith(".")):
                    continue
                if not entry.name.isprintable():
                    continue
                is_folder = entry.is_dir()
                found.append((not is_folder, os.path.join(head, entry.name) + ("/" if is_folder else "")))  # noqa: PTH118
    except (OSError, RuntimeError, ValueError):  # no such folder, a home that nobody has, a NUL
        return []
    return [name for _, name in sorted(found)[:limit]]
