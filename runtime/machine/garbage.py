"""Imports without garbage collection.

Imports make many objects that stay, so collections among them take time and find nothing. `headrace run` and the engine
process wrap their large imports in `importing`.

Guard: tests/runtime/machine/test_garbage.py.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_exempt = False  # the objects of the first block are exempt from collections already


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
