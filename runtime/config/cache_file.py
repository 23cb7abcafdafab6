"""A small JSON file of what was found out here and can be found out again: measurements, hashes.

Whatever is wrong with it reads as empty. It is replaced whole; where that fails the old one stays, and nobody is told.
"""

import contextlib
import json
from pathlib import Path
from typing import Any

from headrace.runtime.config.replace_file import replace_file


def read_cache(path: Path) -> dict[str, Any]:
    """The object in `path`; empty if there is none, or no sound one."""
    try:
        stored = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return stored if isinstance(stored, dict) else {}


def write_cache(path: Path, content: dict[str, Any]) -> None:
    """Replace the file in one step, its folder made if need be."""
    with contextlib.suppress(OSError):
        replace_file(path, json.dumps(content, indent=2) + "\n")
