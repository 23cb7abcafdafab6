"""Events of one HTTP request's generations, awaited on the event loop.

`ServedEngine.submit` makes it and puts events in; `respond.py` takes them out with `next`, and calls `leave` if the
request ends early. It has one generation per choice.

Guard: tests/app/server/test_respond.py.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

from headrace.app.engine.events import Abandoned, ContextFull, Done, Event, Failed, TokensCounted
from headrace.app.server.errors import ApiError, event_error

END = (Done, ContextFull, Failed, Abandoned, TokensCounted)
"""The last event of a generation."""


class Answering:
    """The running generations of one HTTP request. Events come as (choice, event).

    ids: of the generations, by choice.
    watchers: readers of step records that it counts as, see `ServedEngine.watch`.
    open: ids of those that have not ended.
    started: monotonic clock.
    """

    def __init__(self, leave: Callable[["Answering"], None], ids: Sequence[int], watchers: int = 0) -> None:
        self.ids = ids
        self.watchers = watchers
        self.open = set(ids)
        self.started = time.monotonic()
        self._leave = leave
        self._events: asyncio.Queue[tuple[int, Event] | ApiError] = asyncio.Queue()

    def put(self, generation: int, event: Event) -> None:
        """Deliver an event of one of its generations."""
        if generation in self.open:
            if isinstance(event, END):
                self.open.discard(generation)
            self._events.put_nowait(event_error(event) or (self.ids.index(generation), event))

    def fail(self, error: ApiError) -> None:
        """End the request with an error."""
        if self.open:
            self.open.clear()
            self._events.put_nowait(error)

    async def next(self, timeout: float | None = None) -> tuple[int, Event] | None:
        """Wait for the next event; None after `timeout` seconds. Raises ApiError for an event that ends the request."""
        try:
            async with asyncio.timeout(timeout):
                arrived = await self._events.get()
        except TimeoutError:
            return None
        if isinstance(arrived, ApiError):
            raise arrived
        return arrived

    @property
    def over(self) -> bool:
        """True if every generation has ended and every event was taken."""
        return not self.open and self._events.empty()

    def leave(self) -> None:
        """Cancel the answers that still run."""
        self._leave(self)
