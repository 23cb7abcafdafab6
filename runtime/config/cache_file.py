"""Small JSON cache files of measurements and hashes.

A broken file reads as empty. Writes replace the file whole; failed writes are ignored.
"""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.runtime.config.regular_file import read_regular
from headrace.runtime.config.replace_file import replace_file

_LARGEST = 64 << 20  # bytes of a file


def read_cache(path: Path) -> dict[str, Any]:
    """Return the object in `path`; empty if there is no valid one."""
    try:
        stored = json.loads(read_regular(path, _LARGEST))
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
