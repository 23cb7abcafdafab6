"""Ctrl-C during an answer: the first cancels it, a second one interrupts the program.

`run` and `batch` answer within this block. The handler sets a flag, which the engine reads between steps and between
prefill chunks, so that the partial answer is kept. The flag is that of one request, or of all requests of a batch or of
several samples. The previous handler, which is put back, takes the second Ctrl-C.

Guard: tests/app/cli/test_run.py.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from headrace.runtime.engine.request import CancelFlag


@contextmanager
def first_interrupt_cancels(cancel: CancelFlag) -> Iterator[None]:
    """Set `cancel` on the first SIGINT within this block.

    The previous handler is restored then, or at the block's end.
    """
    previous = signal.getsignal(signal.SIGINT)

    def handle(_signal: int, _frame: FrameType | None) -> None:
        cancel.set()
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
