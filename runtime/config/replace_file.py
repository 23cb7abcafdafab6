"""Writing a file whole or not at all: whoever reads it, after a crash or a power cut, finds the old text or the new.

It is written beside its place, as .NAME.headrace-PROCESS: a name that nobody else gives, since what a killed process
left there goes with the next write.
"""

import contextlib
import os
import re
import stat
import time
from pathlib import Path

from headrace.runtime.config.to_disk import folder_to_disk, to_disk

_LEFT_S = 60.0  # younger ones may be of a process that has no number here, as in another container


def replace_file(path: Path, text: str) -> None:
    """Put `text` there, UTF-8, its folder made if need be. A link stays one, and who may read it. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path = Path(os.path.realpath(path))  # where a link leads, nothing is made but the file
    partial = path.with_name(f".{path.name}.headrace-{os.getpid()}")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            to_disk(file.fileno())  # on the disk before its name is: a power cut would leave an empty file
        with contextlib.suppress(OSError):  # nothing was there
            partial.chmod(stat.S_IMODE(path.stat().st_mode))
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):
        folder_to_disk(path.parent)  # some file systems have no such thing; either name leads to a whole file
    with contextlib.suppress(OSError):
        _remove_leftovers(path)


def _remove_leftovers(path: Path) -> None:
    """What processes that were killed while they wrote this file left beside it."""
    ours = re.compile(re.escape(f".{path.name}.headrace-") + "([1-9][0-9]{0,9})")
    for other in path.parent.iterdir():
        named = ours.fullmatch(other.name)
        if named and not _runs(int(named[1])) and time.time() - other.lstat().st_mtime > _LEFT_S:
            other.unlink()


def _runs(process: int) -> bool:
    """Whether there is a process of this number; also true where that cannot be told."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass
    return True
