"""Background work in a daemon thread that the calling thread never has to wait for, and reports of slow work.

Executors wait for their threads. After a signal during an import, the background thread may wait for Python's import
lock for ever.

Loading reads the tokenizer this way beside the weights, and downloads flush files beside hashing. Loading and a model's
first pass report the seconds that they take. tests/runtime/machine/test_background.py has work that never ends.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TypeVar

_PATIENCE_S = 1.0  # wait after an error: the thread should not run on while the interpreter ends

_Result = TypeVar("_Result")


@contextmanager
def run_in_background(work: Callable[[], _Result]) -> Iterator[Callable[[], _Result]]:
    """Run `work` in another thread during the block; the yielded function returns its result or raises its error."""
    # The result in a list, empty if there is none: None is a result, too.
    outcome: SimpleQueue[tuple[list[_Result], BaseException | None]] = SimpleQueue()

    def run() -> None:
        try:
            outcome.put(([work()], None))
        except BaseException as error:  # raised by `result`
            outcome.put(([], error))

    def result() -> _Result:
        values, failure = outcome.get()
        outcome.put((values, failure))  # for a second call
        if failure is not None:
            raise failure
        return values[0]

    thread = threading.Thread(target=run, name="background", daemon=True)
    thread.start()
    try:
        yield result
    except BaseException:  # also an interrupt: see `_PATIENCE_S`
        thread.join(_PATIENCE_S)
        raise


@contextmanager
def report_if_slow(report: Callable[[float], None], *, slow_s: float, every_s: float) -> Iterator[None]:
    """Report that a block takes long, while it runs.

    report: called from another thread with the seconds that the block has taken, never after the block.
    slow_s: seconds until the first report.
    every_s: seconds between two reports.
    """
    is_ended = threading.Event()

    def count() -> None:
        seconds = slow_s
        wait_s = slow_s
        while not is_ended.wait(wait_s):
            report(seconds)
            seconds += every_s
            wait_s = every_s

    thread = threading.Thread(target=count, name="slow work", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_ended.set()
        thread.join()
