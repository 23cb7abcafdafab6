"""The file that a command was told to write: all of it, or what was there stays."""

import errno
import os
from pathlib import Path

from headrace.runtime.config.replace_file import replace_file
from headrace.runtime.errors import HeadraceError, UsageError

_DISK = frozenset([errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG])  # no fault of the command line


def write_output(path: Path, text: str) -> None:
    """Put `text` there, UTF-8; in place only where no other file can be put there: a device, a closed folder.

    Raises UsageError for a path that nothing can be written to, HeadraceError where the disk fails.
    """
    try:
        if path.exists() and not (path.is_file() and os.access(path.parent, os.W_OK) and os.access(path, os.W_OK)):
            path.write_text(text, encoding="utf-8")
        elif path.parent.is_dir():
            replace_file(path, text)
        else:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    except OSError as error:
        kind = HeadraceError if error.errno in _DISK else UsageError
        raise kind(f"{path} cannot be written: {error.strerror or error}") from None
