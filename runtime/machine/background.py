"""Work in a second thread while the first goes on, without ever depending on the second to end.

Not an executor, which waits for its thread however it is left. A signal that ends the first thread while it imports
something leaves Python's import lock taken, and the second may need that lock to get anywhere.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TypeVar, cast

_PATIENCE_S = 1.0  # with work that nobody wants any more: a thread had better not run on while the interpreter ends

_Result = TypeVar("_Result")


@contextmanager
def run_in_background(work: Callable[[], _Result]) -> Iterator[Callable[[], _Result]]:
    """Do `work` in another thread while the block runs. What the block gets returns its result, or raises its error."""
    outcome: SimpleQueue[tuple[_Result | None, BaseException | None]] = SimpleQueue()

    def run() -> None:
        try:
            outcome.put((work(), None))
        except BaseException as error:  # handed to whoever asks for the result
            outcome.put((None, error))

    def result() -> _Result:
        value, failure = outcome.get()
        if failure is not None:
            raise failure
        return cast(_Result, value)

    thread = threading.Thread(target=run, name="background", daemon=True)
    thread.start()
    try:
        yield result
    except BaseException:
        thread.join(_PATIENCE_S)
        raise
