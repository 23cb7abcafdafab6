"""Preparation of requests next to the decode loop: prompts are encoded and grammars compiled. Either can take seconds.

Three threads take one request after the other each: very long texts, requests with a schema, a grammar or tools, and
all others. So a slow request delays its own kind alone, and never a step.

`process.CommandLoop` submits requests, and runs the `start` of each one that comes back prepared.

Guard: tests/app/engine/test_preparation.py.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from msgspec import Struct

from headrace.app.engine.commands import CountTokens, Generate

LONG_TEXT = 500_000  # characters, which take a second or more to encode
_THREADS = ("long prompts", "constrained prompts", "prompts")


class Prepared(Struct, frozen=True):
    """A request that was prepared.

    start: begins its answer, on the model's thread; None if it has ended.
    error: raised by its preparation.
    """

    id: int
    start: Callable[[], None] | None = None
    error: BaseException | None = None


class Preparation:
    """Prepares requests, each on the thread of its kind.

    pending: requests that were not taken yet; the command loop counts it down.
    """

    def __init__(self, hand_over: Callable[[Prepared], None]) -> None:
        """hand_over: takes every request once it is prepared, on any thread."""
        self.pending = 0
        self._hand_over = hand_over
        # In the order of _THREADS; each has one thread, which takes its requests in order.
        self._long, self._constrained, self._others = (ThreadPoolExecutor(1, name) for name in _THREADS)

    def submit(self, command: Generate | CountTokens, prepare: Callable[[], Callable[[], None] | None]) -> None:
        """Prepare a request on its thread. prepare: returns its `start`."""

        def prepared() -> Prepared:
            try:
                return Prepared(command.id, prepare())
            except BaseException as error:  # panics of libraries are no Exceptions
                return Prepared(command.id, error=error)

        self.pending += 1
        self._thread_of(command).submit(lambda: self._hand_over(prepared()))

    def _thread_of(self, command: Generate | CountTokens) -> ThreadPoolExecutor:
        if sum(map(len, _texts(command))) > LONG_TEXT:
            return self._long
        constrained = isinstance(command, Generate) and command.options.constrained
        return self._constrained if constrained or command.tools is not None else self._others


def _texts(command: Generate | CountTokens) -> Iterator[str]:
    if isinstance(command, Generate) and command.prompt is not None:
        yield command.prompt
    values: list[object] = [value for message in command.messages for value in message.values()]
    yield from (value for value in values if isinstance(value, str))
