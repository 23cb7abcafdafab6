"""The engine as the chat's process sees it: start it, submit, poll. Nothing here blocks, and nothing imports mlx.

Used from one thread. `state` and `card` change inside `poll`, never between two polls.
"""

from dataclasses import replace
from typing import Literal, Protocol

from headrace.app.engine.commands import Cancel, Generate, ModelSpec, PrefetchPrompt, Pull, Rest
from headrace.app.engine.events import (
    Abandoned,
    ContextFull,
    Delta,
    Died,
    Done,
    Dropped,
    Event,
    Failed,
    Prefill,
    Pulled,
    PullFailed,
    PullProgress,
    Ready,
)
from headrace.app.engine.link import EngineLink
from headrace.app.engine.model_card import ModelCard
from headrace.runtime.errors import EngineError

_LAST_S = 1.0  # for an idle engine to write what was said last

State = Literal["stopped", "loading", "ready", "failed", "dead"]


class ChatEngine(Protocol):
    """What a chat needs of an engine. `EngineClient` is the real one, `tests/app/scripted_engine.py` a scripted one."""

    @property
    def state(self) -> State:
        """stopped: never started or closed; failed: the model could not be loaded; dead: restart() brings it back."""
        ...

    @property
    def card(self) -> ModelCard | None:
        """The loaded model, None unless ready."""
        ...

    def start(self, spec: ModelSpec) -> None:
        """Load a model in a new process, ending the one before. LoadProgress and Ready (or Failed, Died) follow; Died
        alone where no process can be started."""
        ...

    def restart(self) -> None:
        """Start the last spec again."""
        ...

    def submit(self, command: Generate) -> None:
        """Ask for a generation, beside those that go on; while the model loads it waits.

        Raises EngineError when nothing is running.
        """
        ...

    def prefetch(self, command: PrefetchPrompt) -> None:
        """Have the engine use its idle time. Without one that is ready nothing happens."""
        ...

    def rest(self) -> None:
        """Have the engine leave the machine alone until it is asked for something. Nothing happens without one."""
        ...

    def cancel(self, generation: int | None = None) -> None:
        """End a submitted generation, all of them for None; each still answers with its Done (reason `cancelled`), or
        with Abandoned where the model is still being loaded."""
        ...

    def poll(self) -> list[Event]:
        """Everything that happened since the last call, in order. Never blocks."""
        ...

    def pull(self, name: str) -> None:
        """Fetch a model in the background: PullProgress, then Pulled or PullFailed. Raises EngineError if busy."""
        ...

    def cancel_pull(self) -> None:
        """Stop fetching; PullFailed follows. What was downloaded is kept for the next try where the source allows."""
        ...

    def close(self) -> None:
        """End every process; an idle engine first writes what was said last, within a second. The client can be
        started again."""
        ...


class EngineClient:
    """A ChatEngine over a process of its own, and a second one while a model is fetched."""

    def __init__(self, draft: str | None = None) -> None:
        """draft: the draft model of every model that is started and says nothing of one."""
        self.state: State = "stopped"
        self.card: ModelCard | None = None
        self._draft = draft
        self._spec: ModelSpec | None = None
        self._link: EngineLink | None = None
        self._pull: tuple[str, EngineLink] | None = None
        self._open: set[int] = set()  # generations that have not ended
        self._backlog: list[Event] = []  # events that no process sent

    @property
    def pid(self) -> int | None:
        """The engine's process."""
        return self._link.pid if self._link else None

    def start(self, spec: ModelSpec) -> None:
        self._end()
        spec = spec if spec.draft is not None else replace(spec, draft=self._draft)
        self._spec = spec
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

    def submit(self, command: Generate) -> None:
        if self._link is None or self.state not in ("loading", "ready"):
            raise EngineError("the engine is not running", "restart it, or choose another model")
        self._open.add(command.id)
        self._link.send(command)

    def prefetch(self, command: PrefetchPrompt) -> None:
        if self._link is not None and self.state == "ready" and not self._link.behind:
            self._link.send(command)

    def rest(self) -> None:
        if self._link is not None:
            self._link.send(Rest())

    def cancel(self, generation: int | None = None) -> None:
        if self._link is not None:
            for one in sorted(self._open if generation is None else self._open & {generation}):
                self._link.send(Cancel(one))
                if self.state == "loading":  # or it would be waited for until the model is there
                    self._open.discard(one)
                    self._backlog.append(Abandoned(one))

    def poll(self) -> list[Event]:
        events, self._backlog = self._backlog, []
        if self._link is not None:
            for event in self._link.drain():
                if self._is_awaited(event):
                    self._note(event)
                    events.append(event)
        return events + self._poll_pull()

    def pull(self, name: str) -> None:
        if self._pull is not None:
            raise EngineError(f"{self._pull[0]} is still being fetched", "one at a time")
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
        """End the process, not losing what it said; whatever it was doing is abandoned."""
        if self._link is not None:
            self._link.kill()
            self._backlog = self.poll()
            self._link = None
        self._backlog += map(Abandoned, sorted(self._open))
        self._open.clear()
        self.card = None

    def _is_awaited(self, event: Event) -> bool:
        """Whether it is not of a generation that was abandoned while the model was loaded."""
        if not isinstance(event, Prefill | Delta | Dropped | ContextFull | Done | Failed) or event.id is None:
            return True
        return event.id in self._open

    def _note(self, event: Event) -> None:
        if isinstance(event, Ready):
            self.state, self.card = "ready", event.card
        elif isinstance(event, Done | ContextFull):
            self._open.discard(event.id)
        elif isinstance(event, Failed):
            if event.id is None:
                self.state = "failed"
            else:
                self._open.discard(event.id)
        elif isinstance(event, Died):
            self.state, self.card, self._link = "dead", None, None
            self._open.clear()

    def _poll_pull(self) -> list[Event]:
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
    """There are no processes, files or memory left for one, or this Python is not where it was."""
    return f"no process can be started: {error.strerror}"
