"""The engine as the chat's process sees it: start it, submit, poll. Nothing here blocks, and nothing imports mlx.

The engine is a fresh interpreter of its own, in its own session: no signal of the terminal reaches it, nothing it
prints reaches the terminal (standard output and error go to `log_path`), and it leaves when this process does,
however that ends, because its end of the socket closes. `subprocess` starts it rather than `multiprocessing`: that
would hand the terminal down and run this program's main module again.

Used from one thread. A reader thread per process unpickles events into a deque, so `poll` only empties that, and
a process killed in the middle of a message cannot make anyone wait.
"""

from pathlib import Path
from typing import Literal, Protocol

from app.engine_messages import Event, Generate, ModelCard, ModelSpec

State = Literal["stopped", "loading", "ready", "failed", "dead"]


class ChatEngine(Protocol):
    """What a chat needs of an engine. `EngineClient` is the real one, `tests/app/scripted_engine.py` a scripted one."""

    @property
    def state(self) -> State:
        """stopped: never started or closed; failed: the model could not be loaded; dead: restart() brings it back."""
        ...

    @property
    def card(self) -> ModelCard | None:
        """The loaded model, None until Ready."""
        ...

    def start(self, spec: ModelSpec) -> None:
        """Load a model in a new process, ending the one before. LoadProgress and Ready (or Failed, Died) follow."""
        ...

    def restart(self) -> None:
        """Start the last spec again."""
        ...

    def submit(self, command: Generate) -> None:
        """Queue a generation; while the model loads it waits. Raises EngineError when nothing is running."""
        ...

    def cancel(self) -> None:
        """End the submitted generations; each still answers with its Done (reason `cancelled`)."""
        ...

    def poll(self) -> list[Event]:
        """Everything that happened since the last call, in order. Never blocks."""
        ...

    def pull(self, name: str) -> None:
        """Fetch a model in the background: PullProgress, then Pulled or PullFailed. Raises EngineError if busy."""
        ...

    def cancel_pull(self) -> None:
        """Stop fetching; what was downloaded is kept for the next try where the source allows."""
        ...

    def close(self) -> None:
        """End every process. The client can be started again."""
        ...
