"""Imports without garbage collection.

Imports make many objects that stay, so collections among them take time and find nothing. The command line, `headrace
run`, the engine process and that of chat templates wrap their large imports in `importing`.

Guard: tests/runtime/machine/test_garbage.py.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


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
