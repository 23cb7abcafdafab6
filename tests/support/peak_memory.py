"""Peak memory of this process: since a point in time, and in all."""

import contextlib
import os
import resource
import sys
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")


class PeakMemory:
    """Peak memory since creation, above the level then. Linux only; 0 elsewhere."""

    def __init__(self) -> None:
        self._before = 0
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
            self._before = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE

    def grown(self) -> int:
        """Return bytes."""
        return peak_bytes() - self._before if self._before else 0


def peak_bytes() -> int:
    """Return the peak in bytes. On Linux `ru_maxrss` would include the parent process's peak."""
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
