"""Writing a file whole or not at all: whoever reads it, after a crash too, finds the old text or the new one."""

import contextlib
import os
from pathlib import Path


def replace_file(path: Path, text: str) -> None:
    """Put `text` there, UTF-8, its folder made if need be. A symbolic link stays one. Raises OSError."""
    path = Path(os.path.realpath(path))
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
