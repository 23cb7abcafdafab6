"""A chat without a screen: one session, one engine, and everything a person can do with them.

The UI calls the methods below, calls `poll` 10-15 times a second and draws what the properties say. Every message is
in the store before the engine hears of it, and an answer grows in the store as it grows on the screen.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from app.engine_messages import Event
from app.sessions.records import Message, Session

Phase = Literal["idle", "waiting", "prefill", "answering"]
ContextChoice = Literal["drop", "summarise", "new"]


@dataclass(frozen=True, slots=True)
class ContextQuestion:
    """The context is full: the user has to choose what goes.

    tokens: what the prompt would have, or what prompt and answer have grown to. during_answer: the answer ran into
    the limit and was kept as partial; choosing continues it.
    """

    tokens: int
    limit: int
    during_answer: bool


@dataclass(frozen=True, slots=True)
class Branches:
    """The alternatives at one message: their ids, oldest first, and which one is shown."""

    ids: tuple[int, ...]
    shown: int  # index into ids


class ConversationApi(Protocol):
    """The surface the TUI uses (becomes the class itself)."""

    session: Session
    messages: list[Message]  # the active branch, first to last; the growing answer is its last
    phase: Phase
    context_tokens: int  # prompt and answer as last known
    question: ContextQuestion | None
    notice: str | None  # the last thing the user should be told, one line; cleared by the next action

    @property
    def context_limit(self) -> int | None: ...
    @property
    def not_sent(self) -> int:
        """How many messages at the start of the active branch are no longer sent to the model."""
        ...

    def branches(self, message_id: int) -> Branches: ...
    def send(self, text: str) -> Message:
        """Raises UsageError (empty text, unreadable attachment), EngineError (busy, engine dead)."""
        ...

    def stop(self) -> None: ...
    def regenerate(self, message_id: int | None = None) -> None: ...
    def edit(self, message_id: int, text: str) -> None:
        """A user message: a new branch, answered at once. An answer: a new branch with that text, not continued."""
        ...

    def continue_answer(self) -> None: ...
    def switch_branch(self, message_id: int, step: int) -> None: ...
    def set_model(self, name: str | None) -> None: ...
    def set_system(self, text: str) -> None: ...
    def set_sampling(self, values: Mapping[str, Any]) -> None: ...
    def resolve(self, choice: ContextChoice) -> None: ...
    def poll(self) -> list[Event]: ...
    def close(self) -> None: ...
