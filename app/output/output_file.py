"""Output files of commands, replaced as a whole.

A command calls `check_output` before it works for minutes, and `write_output` at its end.

Guard: tests/app/output/test_output_file.py.
"""

import errno
import os
from pathlib import Path

from headrace.runtime.config.files import replace_file
from headrace.runtime.errors import HeadraceError, UsageError

_DISK = frozenset([errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG])  # not the command line's fault


def check_output(path: Path, option: str) -> None:
    """Raise UsageError for a path of `option` that cannot be written; called before minutes of work."""
    if path.is_dir():
        raise UsageError(f"{option} {path} is a directory", "give a file name")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: no directory {path.parent}")
    written = path
    if not path.exists():
        written = path.parent
    if not os.access(written, os.W_OK):
        raise UsageError(f"{option} {path} cannot be written")


def write_output(path: Path, text: str) -> None:
    """Write UTF-8 text by replacement; in place only for devices and in folders that cannot be written.

    Raises UsageError for a bad path, HeadraceError if the disk fails.
    """
    try:
        if path.exists() and not (path.is_file() and os.access(path.parent, os.W_OK) and os.access(path, os.W_OK)):
            path.write_text(text, encoding="utf-8")
        elif path.parent.is_dir():
            replace_file(path, text)
        else:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    except OSError as error:
        text = f"{path} cannot be written: {error.strerror or error}"
        if error.errno in _DISK:
            raise HeadraceError(text) from None
        raise UsageError(text) from None
