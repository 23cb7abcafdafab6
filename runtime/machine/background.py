"""Background work in a daemon thread that the calling thread never has to wait for.

Executors wait for their threads. After a signal during an import, the background thread may wait for Python's import
lock for ever.

Loading reads the tokenizer this way beside the weights, and downloads flush files beside hashing.
tests/runtime/machine/test_background.py has work that never ends.
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
    except BaseException:
        thread.join(_PATIENCE_S)
        raise
