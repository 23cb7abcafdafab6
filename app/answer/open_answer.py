"""An answer on its way from the engine's thread to its readers: a queue of parts, for threads and for asyncio tasks.

`EngineThread` puts the parts and wakes the tasks that wait for them, `AnswerStream` and `app.api` read them.

Guard: tests/test_api_threads.py.
"""

from collections import defaultdict, deque
from collections.abc import Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeVar

from headrace.app.answer.answer import Answer
from headrace.models.text.events import Completed, TextChunk
from headrace.runtime.errors import HeadraceError

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, Future

MAX_UNREAD = 64
"""Parts of an answer that wait for its reader. If no other answer is read either, the engine then waits, too."""
_LOOK_S = 0.5  # between two looks at signals in a wait
_Item = TypeVar("_Item")

AnswerPart = TextChunk | Completed | HeadraceError


class OpenAnswer:
    """The parts of one answer, for any number of readers.

    parts: those that are not read yet, up to `Completed` or an error; then None.
    in_parts: a `TextChunk` is delivered for each step, not the end alone.
    is_over: its end was delivered.
    is_closed: no part is wanted any more.
    """

    def __init__(
        self, answer: Answer, *, in_parts: bool = True, parts: "SimpleQueue[AnswerPart | None] | None" = None
    ) -> None:
        """parts: a queue that several answers may share."""
        self.answer = answer
        self.in_parts = in_parts
        self.parts: SimpleQueue[AnswerPart | None] = SimpleQueue() if parts is None else parts
        self.is_over = False
        self.is_closed = False
        self._waiters: deque[tuple[AbstractEventLoop, Future[None]]] = deque()  # tasks to wake for the next part
        self._waiting_in: list[AbstractEventLoop] = []  # the loop of each task that waits, until the task goes on

    @property
    def is_wanted(self) -> bool:
        """True if the engine should go on for it: its reader keeps up, or it has to end."""
        is_behind = self.in_parts and self.parts.qsize() >= MAX_UNREAD
        return not is_behind or bool(self.answer.request.cancel)

    @property
    def is_lost(self) -> bool:
        """True if a reader waits in an event loop that was closed, perhaps after the reader was woken."""
        return any(loop.is_closed() for loop in tuple(self._waiting_in))

    def put(self, part: AnswerPart) -> None:
        """Deliver a part; `wake` tells the tasks that wait for it."""
        self.is_over = isinstance(part, Completed | HeadraceError)
        if not self.is_closed:
            self.parts.put(part)

    def get(self) -> AnswerPart | None:
        """Wait for the next part, on any thread; None after the last one."""
        return self._taken(wait_for_item(self.parts))

    async def next(self) -> AnswerPart | None:
        """Wait for the next part in a task; None after the last one."""
        from asyncio import get_running_loop  # late: programs without tasks do not need it

        while True:
            with suppress(Empty):
                return self._taken(self.parts.get_nowait())
            loop = get_running_loop()
            waiter = loop.create_future()
            self._waiters.append((loop, waiter))
            self._waiting_in.append(loop)
            try:
                if self.parts.empty():  # looked at after the waiter is known: no part comes unnoticed
                    await waiter
            finally:
                self._waiting_in.remove(loop)

    def close(self) -> None:
        """End the answer, and the waits of its readers."""
        self.is_closed = True
        if not self.is_over:
            self.answer.request.cancel.set()
        self.parts.put(None)
        wake([self])

    def take_waiters(self) -> "Iterable[tuple[AbstractEventLoop, Future[None]]]":
        """Yield the tasks that wait, by loop and future, each once."""
        while self._waiters:
            yield self._waiters.popleft()

    def _taken(self, part: AnswerPart | None) -> AnswerPart | None:
        if self.is_closed or isinstance(part, Completed | HeadraceError | None):
            self.parts.put(None)  # for other readers, and for this one if it goes on
        return None if self.is_closed else part


def wait_for_item(queue: "SimpleQueue[_Item]") -> _Item:
    """Wait for the next item of a queue, on any thread.

    A signal that arrives just before a wait is handled after it, so no wait is long.
    """
    while True:
        with suppress(Empty):
            return queue.get(timeout=_LOOK_S)


def wake(answers: Iterable[OpenAnswer]) -> None:
    """Wake the tasks that wait for parts of these answers, with one call for each event loop."""
    waiters: dict[AbstractEventLoop, list[tuple[OpenAnswer, Future[None]]]] = defaultdict(list)
    for opened in answers:
        for loop, waiter in opened.take_waiters():
            waiters[loop].append((opened, waiter))
    for loop, waiting in waiters.items():
        try:
            loop.call_soon_threadsafe(_resolve, [waiter for _, waiter in waiting])
        except RuntimeError:  # the loop is closed: its tasks never read on
            for opened, _ in waiting:
                opened.close()


def _resolve(waiters: "Iterable[Future[None]]") -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
