"""The handle of the engine process in the chat or the server: start, submit, poll. Nothing here imports mlx.

Only the end of a process is waited for: at once if it is killed, and in `close` while it writes K/V to disk.

A client belongs to one thread. `state` and `card` change only in `start`, `poll` and `close`. Chat and server use
`EngineClient`; a chat with --connect uses `remote.RemoteEngine`. Both are a `ChatEngine`, and so is the scripted engine
of the tests.

Guard: tests/app/engine/test_client.py.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

from msgspec.structs import replace

from headrace.app.config.load_options import ModelSpec
from headrace.app.engine.commands import (
    Cancel,
    CountTokens,
    Generate,
    LimitKV,
    PrefetchPrompt,
    Pull,
    Rest,
    TimeSteps,
)
from headrace.app.engine.events import (
    Abandoned,
    AnswerEvent,
    ContextFull,
    Died,
    Done,
    Event,
    Failed,
    Pulled,
    PullFailed,
    PullProgress,
    Ready,
    Recommended,
    TokensCounted,
)
from headrace.app.engine.link import LOST_RANK, EngineLink
from headrace.app.engine.model_card import ModelCard
from headrace.runtime.errors import EngineError

_LAST_S = 1.0  # for an idle engine to write the last chat's K/V to disk

EngineState = Literal["stopped", "loading", "ready", "failed", "dead"]


class ChatEngine(Protocol):
    """An engine for a chat: `EngineClient`, `RemoteEngine`, or a scripted one in tests.

    state: stopped: not started, or closed. failed: the model could not be loaded. dead: `restart` starts another.
    card: the loaded model; None unless ready.
    is_remote: it is a server's: its model was chosen with its address.
    starts: number of starts, each of which loads a model.
    """

    state: EngineState
    card: ModelCard | None
    is_remote: bool
    starts: int

    @property
    def pid(self) -> int | None:
        """Id of the engine process; None if there is none."""
        ...

    def start(self, spec: ModelSpec) -> None:
        """Load a model in a new process, instead of the one before. LoadProgress and Ready (or Failed, Died) follow."""
        ...

    def restart(self) -> None:
        """Start the last model again. Raises EngineError if there was none."""
        ...

    def submit(self, command: Generate) -> None:
        """Submit a request, also while others run or the model loads. Raises EngineError if no engine runs."""
        ...

    def prefetch(self, command: PrefetchPrompt) -> None:
        """Prefetch a prompt, if the engine is ready."""
        ...

    def rest(self) -> None:
        """Suspend idle work until the next command."""
        ...

    def time_steps(self, every: int) -> None:
        """Time one decode step in `every` by part."""
        ...

    def cancel(self, generation: int | None = None) -> None:
        """Cancel a generation, or all (None). Done follows (reason `cancelled`), or Abandoned while loading."""
        ...

    def poll(self) -> list[Event]:
        """Return the events since the last call, in order. Never blocks."""
        ...

    def pull(self, name: str) -> None:
        """Fetch a model in the background: PullProgress, then Pulled or PullFailed. Raises EngineError if one is."""
        ...

    def cancel_pull(self) -> None:
        """Stop the download; PullFailed follows. A partial download is kept, if the source can resume it."""
        ...

    def close(self) -> None:
        """End all processes; an idle engine first writes the last K/V to disk. The client can be started again."""
        ...


def generations_to_cancel(running: set[int], generation: int | None) -> Sequence[int]:
    """Return this generation if it runs, None: all that run, oldest first."""
    if generation is None:
        return sorted(running)
    return sorted(running & {generation})


class EngineClient:
    """A ChatEngine in a process of its own, with a second process for downloads."""

    def __init__(self) -> None:
        self.state: EngineState = "stopped"
        self.card: ModelCard | None = None
        self.is_remote = False
        self.starts = 0
        self._spec: ModelSpec | None = None  # of the last start
        self._has_lost_rank = False  # another machine of this model was lost: later starts use this one alone
        self._link: EngineLink | None = None
        self._pull: tuple[str, EngineLink] | None = None
        self._open: set[int] = set()  # running generations
        self._backlog: list[Event] = []  # events that come from no process

    @property
    def pid(self) -> int | None:
        """Id of the engine process."""
        return self._link.pid if self._link else None

    def start(self, spec: ModelSpec) -> None:
        self._end()
        self.starts += 1
        self._spec = spec
        if self._has_lost_rank:  # this machine goes on alone, if the model fits
            spec = replace(spec, hosts=None)
        try:
            self._link = EngineLink()
        except OSError as error:
            self.state = "dead"
            self._backlog.append(Died(_not_started(error)))
        else:
            self.state = "loading"
            self._link.send(spec)

    def restart(self) -> None:
        if self._spec is None:
            raise EngineError("no model was ever started")
        self.start(self._spec)

    @property
    def descriptor(self) -> int | None:
        """The socket whose arrivals `poll` reads, for an event loop."""
        return self._link.descriptor if self._link else None

    @property
    def has_unsent(self) -> bool:
        """True if commands wait for room in the socket; `poll` sends them."""
        return self._link is not None and self._link.has_unsent

    def submit(self, command: Generate | CountTokens) -> None:
        if self._link is None or self.state not in ("loading", "ready"):
            raise EngineError("the engine is not running", "restart it, or choose another model")
        self._open.add(command.id)
        self._link.send(command)

    def prefetch(self, command: PrefetchPrompt) -> None:
        if self._link is not None and self.state == "ready" and not self._link.has_unsent:
            self._link.send(command)

    def rest(self) -> None:
        if self._link is not None:
            self._link.send(Rest())

    def time_steps(self, every: int) -> None:
        if self._link is not None:
            self._link.send(TimeSteps(every))

    def limit_kv(self, total: int) -> None:
        """Limit the bytes for K/V, also during answers and while the model loads."""
        if self._link is not None:
            self._link.send(LimitKV(total))

    def cancel(self, generation: int | None = None) -> None:
        if self._link is not None:
            for each in generations_to_cancel(self._open, generation):
                self._link.send(Cancel(each))
                if self.state == "loading":  # a Done would wait for the model
                    self._open.discard(each)
                    self._backlog.append(Abandoned(each))

    def poll(self) -> list[Event]:
        events = self._backlog
        self._backlog = []
        if self._link is not None:
            for event in self._link.drain():
                if self._is_awaited(event):
                    self._note(event)
                    events.append(event)
        return events + self._poll_pull()

    def pull(self, name: str) -> None:
        if self._pull is not None:
            fetched, _ = self._pull
            raise EngineError(f"{fetched} is still being fetched", "one at a time")
        try:
            link = EngineLink()
        except OSError as error:
            raise EngineError(_not_started(error)) from error
        link.send(Pull(name))
        self._pull = (name, link)

    def cancel_pull(self) -> None:
        if self._pull is not None:
            name, link = self._pull
            self._pull = None
            link.kill()
            self._backlog.append(PullFailed(name, f"fetching {name} was stopped", None))

    def close(self) -> None:
        self.cancel_pull()
        if self._link is not None and self.state == "ready" and not self._open:
            self._link.quit(_LAST_S)
        self._end()
        self.state = "stopped"

    def _end(self) -> None:
        """End the process and abandon its generations; its last events stay in the backlog."""
        if self._link is not None:
            self._link.kill()
            self._backlog = self.poll()  # events from before, then those that the process had still sent
            self._link = None
        self._backlog += map(Abandoned, sorted(self._open))
        self._open.clear()
        self.card = None

    def _is_awaited(self, event: Event) -> bool:
        """True if an event is not one of an abandoned generation."""
        return not isinstance(event, AnswerEvent) or event.id is None or event.id in self._open

    def _note(self, event: Event) -> None:
        """Update the state, the card and the open generations by an event."""
        if isinstance(event, Ready):
            self.state = "ready"
            self.card = event.card
        elif isinstance(event, Recommended) and self.card is not None:
            self.card = replace(self.card, recommended=event.model)
        elif isinstance(event, Done | ContextFull | Abandoned | TokensCounted):
            self._open.discard(event.id)
        elif isinstance(event, Failed):
            if event.id is None:
                self.state = "failed"
            else:
                self._open.discard(event.id)
        elif isinstance(event, Died):
            self.state = "dead"
            self.card = None
            self._link = None
            if event.message.startswith(LOST_RANK):
                self._has_lost_rank = True
            self._open.clear()

    def _poll_pull(self) -> list[Event]:
        """Return the events of the download; end its process after the last one."""
        if self._pull is None:
            return []
        name, link = self._pull
        events: list[Event] = []
        for event in link.drain():
            if isinstance(event, Died):
                event = PullFailed(name, event.message, None)
            if isinstance(event, PullProgress | Pulled | PullFailed):
                events.append(event)
            if isinstance(event, Pulled | PullFailed):
                link.kill()
                self._pull = None
                break
        return events


def _not_started(error: OSError) -> str:
    return f"no process can be started: {error.strerror}"
