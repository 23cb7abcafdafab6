"""Imports without garbage collection."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_exempt = False


@contextmanager
def importing() -> Iterator[None]:
    """Collect no garbage in a block of imports, whose objects stay.

    After the first block of a process, collections do not look at the objects that exist by then.
    """
    global _exempt
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not _exempt:
            gc.freeze()
            _exempt = True
        if enabled:
            gc.enable()
