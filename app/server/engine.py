"""The engine process on an asyncio loop: requests in, events of each request out, restart, unload when idle.

Everything runs on the loop's thread, and nothing blocks it: the engine's socket is read when it has data. Listeners see
every event, for metrics and telemetry.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence

from headrace.app.engine.client import EngineClient
from headrace.app.engine.commands import TIMED_EVERY, CountTokens, Generate, ModelSpec
from headrace.app.engine.events import (
    AnswerEvent,
    Died,
    Event,
    Failed,
    LoadProgress,
    Ready,
)
from headrace.app.engine.model_card import ModelCard
from headrace.app.server.answering import END, Answering
from headrace.app.server.errors import ApiError
from headrace.runtime.errors import HeadraceError

_TICK_S = 0.25  # between two looks at the process and the clock
_RESTART_S = (0.0, 1.0, 5.0, 30.0)  # before a restart: the first, second, ... in a row
_STEADY_S = 60.0  # of work after which restarts count from the beginning
NOT_LOADED = ApiError(503, "the model cannot be loaded", "model_not_loaded", retry_after=30)
DIED = ApiError(500, "the engine stopped unexpectedly; it is started again", "engine_died")

Listener = Callable[[Event], None]


class ServedEngine:
    """One model for many requests at once.

    card: the latest loaded model; None before the first. most_open: generations at a time, waiting ones included.
    idle_unload_s: seconds without a request after which the process is ended; None: never.
    """

    def __init__(
        self, client: EngineClient, spec: ModelSpec, *, most_open: int, idle_unload_s: float | None = None
    ) -> None:
        """client: with the model already loading, or not."""
        self.card: ModelCard | None = None
        self.failure: Failed | None = None  # of the latest attempt to load
        self.restarts = 0
        self.listeners: list[Listener] = []
        self.on_failure: Callable[[], None] = lambda: None
        self._client, self._spec = client, spec
        self._most_open, self._idle_unload_s = most_open, idle_unload_s
        self._answering: dict[int, Answering] = {}
        self._numbers = itertools.count(1)
        self._changed = asyncio.Event()  # of the engine's state
        self._descriptor: int | None = None
        self._writing = False
        self._watchers = 0
        self._deaths: list[float] = []
        self._restart_at: float | None = None
        self._busy_at = time.monotonic()
        self._durations: list[float] = []  # of the latest answers
        self._task: asyncio.Task[None] | None = None
        self._stopping: ApiError | None = None

    def start(self) -> None:
        """Watch the engine on the running loop, and load the model unless it is loading."""
        if self._client.state == "stopped":
            self._client.start(self._spec)
        self._tell_watched()
        self._task = asyncio.get_running_loop().create_task(self._watch())
        self._poll()

    async def close(self) -> None:
        """End the engine process."""
        if self._task is not None:
            self._task.cancel()
        self._detach()
        self._client.close()

    @property
    def state(self) -> str:
        """ready, loading, unloaded (when idle), failed or restarting."""
        return {"stopped": "unloaded", "dead": "restarting"}.get(self._client.state, self._client.state)

    @property
    def open(self) -> int:
        """Generations that run or wait."""
        return len(self._answering)

    async def ready(self) -> ModelCard:
        """Return the loaded model, loaded again if it was unloaded. Raises ApiError if it cannot be loaded."""
        self._check_stopping()
        self._busy_at = time.monotonic()
        if self._client.state in ("stopped", "failed"):
            self.failure = None
            self._client.start(self._spec)
            self._tell_watched()
            self._poll()
        while self._client.state != "ready" or self.card is None:
            self._check_stopping()
            if self._client.state == "failed":
                raise NOT_LOADED
            if self._client.state == "dead" and self._restart_at is not None and len(self._deaths) > 1:
                wait = max(1, round(self._restart_at - time.monotonic()))
                raise ApiError(503, "the engine is being started again", "engine_restarting", retry_after=wait)
            self._changed.clear()
            await self._changed.wait()
        return self.card

    def watch(self, more: int) -> None:
        """Count more readers of step records, or fewer: the engine sends records only while there are some."""
        before, self._watchers = self._watchers, self._watchers + more
        if bool(before) != bool(self._watchers):
            self._tell_watched()

    def submit(
        self,
        make: Callable[[Sequence[int]], Sequence[Generate | CountTokens]],
        count: int = 1,
        *,
        watched: bool = False,
    ) -> Answering:
        """Submit `count` commands. make: the commands, by their ids. watched: read step records until it is left.

        Raises ApiError with status 429 if too many generations are open.
        """
        self._check_stopping()
        if self.open + count > self._most_open:
            raise ApiError(429, "too many requests are waiting", "queue_full", retry_after=self._retry_after())
        ids = [next(self._numbers) for _ in range(count)]
        answering = Answering(self._left, ids, int(watched))
        self.watch(answering.watchers)
        try:
            for command in make(ids):
                self._answering[command.id] = answering
                self._client.submit(command)
        except HeadraceError:
            self._left(answering)
            raise
        self._poll()
        return answering

    def stop(self, error: ApiError) -> None:
        """Refuse new requests with an error from now on."""
        self._stopping = error
        self._changed.set()

    def cut(self) -> None:
        """End all requests with the error of `stop`."""
        assert self._stopping is not None
        for generation in self._answering:
            self._client.cancel(generation)
        self._fail_all(self._stopping)

    def _tell_watched(self) -> None:
        """Tell the engine process, also a new one, whether anyone reads step records."""
        self._client.time_steps(TIMED_EVERY if self._watchers else 0)

    # -- the loop --------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._poll()
            now = time.monotonic()
            if self._restart_at is not None and now >= self._restart_at:
                self._restart_at = None
                self.restarts += 1
                self._client.restart()
                self._tell_watched()
                self._poll()
            if self._answering:
                self._busy_at = now
            idle_for = now - self._busy_at
            if self._idle_unload_s is not None and self._client.state == "ready" and idle_for > self._idle_unload_s:
                self._detach()
                self._client.close()
                self._changed.set()

    def _poll(self) -> None:
        """Take the engine's events, and send what waits to be sent."""
        for event in self._client.poll():
            self._take(event)
        self._attach()

    def _attach(self) -> None:
        """Watch the socket of the present process: for events, and for room if commands wait."""
        loop = asyncio.get_running_loop()
        descriptor = self._client.descriptor
        if descriptor != self._descriptor:
            self._detach()
            self._descriptor = descriptor
            if descriptor is not None:
                loop.add_reader(descriptor, self._poll)
        if descriptor is not None and self._client.behind != self._writing:
            self._writing = not self._writing
            loop.add_writer(descriptor, self._poll) if self._writing else loop.remove_writer(descriptor)

    def _detach(self) -> None:
        if self._descriptor is not None:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._descriptor)
            loop.remove_writer(self._descriptor)
        self._descriptor, self._writing = None, False

    def _take(self, event: Event) -> None:
        match event:
            case Ready():
                self.card = event.card
                self.failure = None
                self._changed.set()
            case Failed(id=None):
                self.failure = event
                self._fail_all(NOT_LOADED)
                self._changed.set()
                self.on_failure()
            case Died():
                self._died()
            case LoadProgress():
                pass
            case _ if isinstance(event, AnswerEvent) and event.id is not None:
                self._deliver(event.id, event)
        for listener in self.listeners:
            listener(event)

    def _deliver(self, generation: int, event: Event) -> None:
        answering = self._answering.get(generation)
        if answering is None:
            return
        if isinstance(event, END):
            del self._answering[generation]
            self._durations = [*self._durations[-15:], time.monotonic() - answering.started]
        answering.put(generation, event)

    def _died(self) -> None:
        self._fail_all(DIED)
        now = time.monotonic()
        self._deaths = [death for death in self._deaths if now - death < _STEADY_S] + [now]
        self._restart_at = now + _RESTART_S[min(len(self._deaths), len(_RESTART_S)) - 1]
        self._changed.set()

    def _fail_all(self, error: ApiError) -> None:
        for answering in self._answering.values():
            answering.fail(error)
        self._answering.clear()

    def _left(self, answering: Answering) -> None:
        for generation in answering.open:
            if self._answering.pop(generation, None) is not None:
                self._client.cancel(generation)
        answering.open.clear()
        self.watch(-answering.watchers)
        answering.watchers = 0
        self._poll()

    def _check_stopping(self) -> None:
        if self._stopping is not None:
            raise self._stopping

    def _retry_after(self) -> int:
        """Return seconds until a place is likely to be free: the median of the latest answers' durations."""
        ordered = sorted(self._durations)
        return max(1, min(60, round(ordered[len(ordered) // 2]))) if ordered else 1
