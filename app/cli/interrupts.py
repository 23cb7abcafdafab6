"""Ctrl-C during an answer: the first cancels it, a second one interrupts the program.

The handler sets a flag, which the engine reads between steps and between prefill chunks, so that the partial answer is
kept. A flag belongs to one request, or to all requests of a batch. The previous handler, which is put back by the first
Ctrl-C, takes the second.

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
