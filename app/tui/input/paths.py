"""Path completion after `@` or `/file `, also in quotes. Reads one directory."""

import os
import re
from pathlib import Path

_LIMIT = 200  # entries of a directory that are looked at
_SHOWN = 8
_AT = re.compile(r'(?:^|\s)@("[^"]*|[^\s"]*)$')
_FILE = re.compile(r'^/file[ \t]+("[^"]*|[^"]*)$')


def typed_path(before_cursor: str) -> str | None:
    """Return the unfinished path before the cursor, with its opening quote; None if there is none."""
    line = before_cursor.rpartition("\n")[2]
    match = _FILE.match(line) or _AT.search(line)
    return match[1] if match else None


def as_typed(path: str, typed: str) -> str:
    """Return `path` in the form of `typed`: quoted if needed, without the closing quote while it can continue."""
    quote = ""
    if typed.startswith('"') or " " in path:
        quote = '"'
    if path.endswith("/"):
        return f"{quote}{path}"
    return f"{quote}{path}{quote} "


def completions(typed: str) -> list[str]:
    """Return paths that continue `typed_path`'s result. Folders end with a slash; hidden files need a dot."""
    head, tail = os.path.split(typed.removeprefix('"'))
    matches: list[tuple[bool, str]] = []
    try:
        folder = Path(head or ".").expanduser()
        with os.scandir(folder) as entries:
            for _, entry in zip(range(_LIMIT), entries, strict=False):
                if not entry.name.startswith(tail) or (entry.name.startswith(".") and not tail.startswith(".")):
                    continue
                if not entry.name.isprintable():
                    continue
                path = os.path.join(head, entry.name)  # noqa: PTH118 (keeps `./` and `~` as they were typed)
                if entry.is_dir():
                    matches.append((False, f"{path}/"))  # folders go first
                else:
                    matches.append((True, path))
    except (OSError, RuntimeError, ValueError):  # no such folder, a home that nobody has, a NUL
        return []
    return [name for _, name in sorted(matches)[:_SHOWN]]
