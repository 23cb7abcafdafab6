"""Ctrl-C while an answer is being generated: the first one asks politely, the second one insists.

The handler only sets the request's flag, which the engine reads between steps and between prefill chunks; the
partial answer is kept. A second Ctrl-C raises KeyboardInterrupt as if no handler were there.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from headrace.runtime.engine.request import CancelFlag


@contextmanager
def first_interrupt_cancels(cancel: CancelFlag) -> Iterator[None]:
    """Within this block SIGINT sets `cancel`; the previous handler comes back after the first one."""
    previous = signal.getsignal(signal.SIGINT)

    def handle(_signal: int, _frame: FrameType | None) -> None:
        cancel.set()
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
