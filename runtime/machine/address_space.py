"""The limit of the process's address space: RLIMIT_AS, which `ulimit -v` sets. Only Linux enforces it.

The limit counts reserved memory, also where it is unused: stacks and heaps of threads, and files that are mapped.
Beyond it libraries abort and threads do not start, without a Python exception. So the space is compared with the need
beforehand: here for MLX itself, in `runtime.machine.memory` for a model. Imports next to nothing.

Guards: tests/app/cli/test_streams_and_signals.py; tests/runtime/machine/test_memory.py for the comparison.
"""

import os
import resource
import sys

from headrace.runtime.errors import NotEnoughMemoryError
from headrace.runtime.metrics.units import format_bytes

HINT = "`ulimit -v unlimited` lifts the limit, where the system allows it"
_IMPORTS = 256 << 20  # MLX, its first computation, and the libraries of a tokenizer
_THREAD = 72 << 20  # a stack of 8 MiB and a heap of glibc
_OTHER_THREADS = 5  # of MLX and of loading, next to one a core


def address_space() -> tuple[int, int] | None:
    """Return (limit, bytes in use) of this process's address space; None without a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY or sys.platform != "linux":
        return None
    from pathlib import Path  # few processes come here

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return limit, pages * os.sysconf("SC_PAGE_SIZE")


def check_imports() -> None:
    """Raise NotEnoughMemoryError if the limit is too small to import MLX."""
    space = address_space()
    if space is None:
        return
    limit, _ = space
    if limit < _IMPORTS:
        raise too_small(limit, _IMPORTS)


def threads_need(cores: int) -> int:
    """Return the bytes that the threads of a running model reserve."""
    return (_OTHER_THREADS + cores) * _THREAD


def too_small(limit: int, needed: int) -> NotEnoughMemoryError:
    """Return the error for a limit below `needed` bytes."""
    return NotEnoughMemoryError(
        f"the address space limit (ulimit -v) of {format_bytes(limit)} is too small; {format_bytes(needed)} is needed",
        HINT,
    )
