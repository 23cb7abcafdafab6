"""A model's engine process on an asyncio loop: requests in, events of each request out, restart, unload when idle.

Everything runs on the loop's thread, and nothing blocks it before `close`: the engine's socket is read when it has
data. Listeners see every event, for metrics and telemetry. `served_models.py` decides which engines run, `respond.py`
submits requests.

The process is stopped, loading, ready, failed or dead (`client.EngineState`). A dead one is started again by `_watch`;
an idle one may be unloaded, on a thread that has the client meanwhile (`_is_unloading`): no other method may touch it
then.

Guards: tests/app/server/test_engine.py, and test_served_models.py for engines that make room for each other.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace

from headrace.app.config.load_options import ModelSpec
from headrace.app.engine.client import EngineClient
from headrace.app.engine.commands import TIMED_EVERY, CountTokens, Generate
from headrace.app.engine.events import (
    AnswerEvent,
    Died,
    Event,
    Failed,
    LoadProgress,
    Ready,
    one_line,
)
from headrace.app.engine.model_card import ModelCard
from headrace.app.server.answering import END, Answering
from headrace.app.server.errors import ApiError
from headrace.models.registry.resolve import DEFAULT_MODEL

_TICK_S = 0.25  # between two looks at the process and the clock
_RESTART_S = (0.0, 1.0, 5.0, 30.0)  # before a restart: the first, second, ... in a row
_STEADY_S = 60.0  # of work after which restarts count from the beginning
_DURATIONS = 16  # latest answers, of which the median duration is told to refused clients
DIED = ApiError(500, "the engine stopped unexpectedly; it is started again", "engine_died")

Listener = Callable[[Event], None]


class ServedEngine:
    """One model for many requests at once.

    spec: how the model is loaded.
    card: the latest loaded model; None before the first.
    failure: of the latest attempt to load; None if it succeeded or still runs.
    requested_at: monotonic clock of the latest request.
    listeners: called with every event.
    on_failure, on_unload: called when the model could not be loaded, and when it was unloaded; set by the owner.
    """

    def __init__(
        self,
        client: EngineClient,
        spec: ModelSpec,
        *,
        max_open: int,
        ids: Iterator[int],
        name: str | None = None,
        idle_unload_s: float | None = None,
    ) -> None:
        """Make the engine of a model.

        client: with the model already loading, or not.
        max_open: generations at a time, waiting ones included.
        ids: of generations; engines share them, so that telemetry tells generations apart.
        name: of the model, as requests give it; None: the file's until it is loaded.
        idle_unload_s: seconds without a request after which the process is ended; None: never.
        """
        self.card: ModelCard | None = None
        self.requested_at = time.monotonic()
        self.failure: Failed | None = None
        self.listeners: list[Listener] = []
        self.on_failure: Callable[[], None] = lambda: None
        self.on_unload: Callable[[], None] = lambda: None
        self.spec = spec
        self._client = client
        self._given_name = name
        self._max_open = max_open
        self._idle_unload_s = idle_unload_s
        self._ids = ids

        # Requests
        self._answering: dict[int, Answering] = {}  # by generation
        self._durations: list[float] = []  # of the latest answers
        self._watchers = 0  # readers of step records
        self._kv_limit: int | None = None  # bytes
        self._stopping: ApiError | None = None  # new requests get it, once `stop` was called

        # The process
        self._changed = asyncio.Event()  # of the engine's state
        self._deaths: list[float] = []  # times of the process's recent ends, each within _STEADY_S
        self._restart_at: float | None = None  # None: no restart is due
        self._unload: asyncio.Future[None] | None = None  # the latest, under way or done

        # The loop
        self._task: asyncio.Task[None] | None = None  # `_watch`
        self._descriptor: int | None = None  # of the socket that the loop watches
        self._writing = False  # the loop waits for room in it

    def start(self) -> None:
        """Watch the engine on the running loop."""
        self._instruct()
        self._task = asyncio.get_running_loop().create_task(self._watch())
        self._poll()

    async def load(self) -> None:
        """Begin to load the model, unless that is done."""
        while self._is_unloading:
            await self._change()
        if not self.is_started:
            self.failure = None
            self.requested_at = time.monotonic()
            self._kv_limit = None
            self._client.start(self.spec)
            self._instruct()
            self._poll()
            self._changed.set()

    async def unload(self) -> None:
        """End the engine process, and with it all requests."""
        if not self._is_unloading:
            self._detach()
            self._restart_at = None
            self._unload = asyncio.ensure_future(asyncio.to_thread(self._client.close))  # may write K/V to disk first
            self._unload.add_done_callback(lambda _: self._unloaded())
        assert self._unload is not None
        await asyncio.shield(self._unload)

    def _unloaded(self) -> None:
        self._poll()
        self._changed.set()
        self.on_unload()

    @property
    def _is_unloading(self) -> bool:
        return self._unload is not None and not self._unload.done()

    async def close(self) -> None:
        """End the engine process, which may take its time to write K/V: the loop waits."""
        if self._task is not None:
            self._task.cancel()
        if self._unload is not None:
            await asyncio.wait([self._unload])
        self._detach()
        self._client.close()

    @property
    def state(self) -> str:
        """ready, loading, unloaded (when idle, or for another model's memory), failed or restarting."""
        return {"stopped": "unloaded", "dead": "restarting"}.get(self._client.state, self._client.state)

    @property
    def is_started(self) -> bool:
        """True if the model is loaded or loads, also again after the engine died."""
        return not self._is_unloading and self._client.state in ("loading", "ready", "dead")

    @property
    def open(self) -> int:
        """Generations that run or wait."""
        return len(self._answering)

    async def loaded(self) -> ModelCard:
        """Return the model, once it is loaded. Raises ApiError if it cannot be loaded, or is not being loaded."""
        self.check_stopping()
        while self._client.state != "ready" or self.card is None:
            self.check_stopping()
            if not self.is_started:
                raise self._not_loaded()
            if self._client.state == "dead" and self._restart_at is not None and len(self._deaths) > 1:
                wait = max(1, round(self._restart_at - time.monotonic()))
                raise ApiError(503, "the engine is being started again", "engine_restarting", retry_after=wait)
            await self._change()
        return self.card

    async def _change(self) -> None:
        """Wait until the engine's state changes."""
        self._changed.clear()
        await self._changed.wait()

    def _not_loaded(self) -> ApiError:
        """Return the error of requests for a model that cannot be loaded. It has no paths of files."""
        reason = "its files may be damaged, `headrace models verify` checks them"
        if self.failure is not None and self.failure.error == "NotEnoughMemoryError":
            reason = one_line(self.failure.message, self.failure.hint)
        message = f"the model {self.name!r:.100} cannot be loaded: {reason}"
        return ApiError(503, message, "model_not_loaded", retry_after=30)

    @property
    def name(self) -> str:
        """The model's name, as requests give it."""
        if self.card is not None:
            return self.card.name
        return self._given_name or Path(self.spec.name or DEFAULT_MODEL).name

    def watch(self, change: int) -> None:
        """Count more readers of step records, or fewer: parts of steps are timed only while there are some."""
        before = self._watchers
        self._watchers += change
        if bool(before) != bool(self._watchers):
            self._instruct()

    def new_ids(self, count: int = 1) -> list[int]:
        """Return ids for the commands of a request."""
        return [next(self._ids) for _ in range(count)]

    def submit(self, commands: Sequence[Generate | CountTokens], *, watched: bool = False) -> Answering:
        """Submit a request's commands, of `new_ids`. watched: read step records until it is left.

        Raises ApiError with status 429 if too many generations are open.
        """
        self.check_stopping()
        if self.open + len(commands) > self._max_open:
            raise ApiError(429, "too many requests are waiting", "queue_full", retry_after=self._retry_after())
        answering = Answering(self._leave, [command.id for command in commands], int(watched))
        self.watch(answering.watchers)
        try:
            for command in commands:
                self._answering[command.id] = answering
                self._client.submit(command)
        except BaseException:  # also one of pickling: the request must not count as open
            self._leave(answering)
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

    def limit_kv(self, total: int) -> None:
        """Limit the bytes of the model's K/V, until it is unloaded."""
        self._kv_limit = total
        self._client.limit_kv(total)

    def _instruct(self) -> None:
        """Tell the engine process, also a new one, its limit, and whether anyone reads the times of parts of steps."""
        if self._is_unloading:  # another thread has the client
            return
        self._client.time_steps(TIMED_EVERY if self._watchers else 0)
        if self._kv_limit is not None:
            self._client.limit_kv(self._kv_limit)

    # -- the loop --------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Look at the process and the clock for ever: restart a dead process, unload an idle one."""
        while True:
            await asyncio.sleep(_TICK_S)
            if self._is_unloading:
                continue
            self._poll()
            now = time.monotonic()
            if self._restart_at is not None and now >= self._restart_at:
                self._restart_at = None
                self._client.restart()
                self._instruct()
                self._poll()
            if self._answering:
                self.requested_at = now
            idle_for = now - self.requested_at
            if self._idle_unload_s is not None and self._client.state == "ready" and idle_for > self._idle_unload_s:
                await self.unload()

    def _poll(self) -> None:
        """Take the engine's events, and send waiting messages."""
        if self._is_unloading:  # another thread has the client
            return
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
        if descriptor is not None and self._client.has_unsent != self._writing:
            self._writing = self._client.has_unsent
            if self._writing:
                loop.add_writer(descriptor, self._poll)
            else:
                loop.remove_writer(descriptor)

    def _detach(self) -> None:
        if self._descriptor is not None:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._descriptor)
            loop.remove_writer(self._descriptor)
        self._descriptor = None
        self._writing = False

    def _take(self, event: Event) -> None:
        """Update the state by an event, deliver it to its request, and tell the listeners."""
        match event:
            case Ready():
                self.card = replace(event.card, name=self._given_name or event.card.name)
                self.failure = None
                self.requested_at = time.monotonic()  # its requests come now
                self._changed.set()
            case Failed(id=None):
                self.failure = event
                self._fail_all(self._not_loaded())
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
            self._durations = [*self._durations, time.monotonic() - answering.started][-_DURATIONS:]
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

    def _leave(self, answering: Answering) -> None:
        """Cancel the generations of a request that have not ended. Later calls do nothing."""
        for generation in answering.open:
            if self._answering.pop(generation, None) is not None:
                self._client.cancel(generation)
        answering.open.clear()
        self.watch(-answering.watchers)
        answering.watchers = 0
        self._poll()

    def check_stopping(self) -> None:
        """Raise the error of `stop`, if it was called."""
        if self._stopping is not None:
            raise self._stopping

    def _retry_after(self) -> int:
        """Return seconds until a place is likely to be free: the median of the latest answers' durations."""
        ordered = sorted(self._durations)
        if ordered:
            return max(1, min(60, round(ordered[len(ordered) // 2])))
        return 1
