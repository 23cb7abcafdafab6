"""Python's garbage collection: imports without it, and the time that it takes.

Imports make many objects that stay, so collections among them take time and find nothing. The command line, `headrace
run`, the engine process and that of chat templates wrap their large imports in `importing`. The engine process calls
`watch_garbage` once; the records of steps have the seconds.

Guard: tests/runtime/machine/test_garbage.py.
"""

import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal


@contextmanager
def importing() -> Iterator[None]:
    """Collect no garbage in a block of imports, whose objects stay.

    Later collections do not look at the objects that exist by then, if the block imported anything.
    """
    enabled = gc.isenabled()
    num_modules = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > num_modules:  # else the objects may be those of a model, which the next one replaces
            gc.freeze()
        if enabled:
            gc.enable()


class _Garbage:
    """Garbage collection of this process since `watch_garbage`; the class itself has the state."""

    seconds = 0.0  # spent in all
    began = 0.0  # clock at the start of the collection that runs
    watched = False


def watch_garbage() -> None:
    """Measure garbage collection in this process from now on."""
    if not _Garbage.watched:
        _Garbage.watched = True
        gc.callbacks.append(_note)


def garbage_seconds() -> float:
    """Return the seconds of garbage collection so far; 0 if it is not watched."""
    return _Garbage.seconds


def _note(phase: Literal["start", "stop"], info: dict[str, int]) -> None:  # noqa: ARG001
    """Count a collection: Python calls it before and after each one (`gc.callbacks`)."""
    if phase == "start":
        _Garbage.began = time.perf_counter()
    else:
        _Garbage.seconds += time.perf_counter() - _Garbage.began
