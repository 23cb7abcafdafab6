"""One of several answers to the same question, on a branch of its own."""

from typing import Any, Literal

from headrace.app.chat.answer_setup import AnswerSetup, answer_request, settings_used
from headrace.app.chat.session_branch import cached_tokens
from headrace.app.chat.turn import Turn, TurnPhase
from headrace.app.engine.commands import Generate
from headrace.app.engine.events import Delta, Prefill, Repeats
from headrace.app.engine.model_card import ModelCard
from headrace.app.sessions.records import Message, Session
from headrace.app.sessions.store import SessionStore
from headrace.runtime.errors import DeletedError
from headrace.runtime.metrics.telemetry import Summary

AnswerPhase = Literal["idle", "queued", "loading"] | TurnPhase


class ParallelAnswer:
    """messages: its branch, first to last, the growing answer included. phase: `queued` while another one is written.

    card: its model's, once loaded. notice: the reason for a missing answer, or a problem with it.
    """

    def __init__(self, name: str, setup: AnswerSetup, store: SessionStore, session: Session) -> None:
        self.name = name
        self.setup = setup
        self.messages: list[Message] = []
        self.phase: AnswerPhase = "idle"
        self.card: ModelCard | None = None
        self.notice: str | None = None
        self.context_tokens = 0
        self.turn: Turn | None = None
        self._store = store
        self._session = session

    @property
    def leaf(self) -> int | None:
        """Id of its last message."""
        return self.messages[-1].id if self.messages else None

    @property
    def effective(self) -> dict[str, Any]:
        """The sampling settings in effect, as far as its model is known."""
        return settings_used(self.setup.sampling, self.card)

    @property
    def repeats(self) -> bool:
        """True if it is being written and has repeated itself for a long time."""
        return self.turn is not None and self.turn.repeats

    @property
    def answer(self) -> Message | None:
        """The last message if it is an answer, complete or not."""
        last = self.messages[-1] if self.messages else None
        return last if last is not None and last.role == "assistant" else None

    def show(self, leaf: int | None) -> None:
        """Read the branch that ends with `leaf`."""
        self.messages = self._store.branch(self._session.id, leaf) if leaf is not None else []
        self.context_tokens = cached_tokens(self.messages)

    def begin(self, card: ModelCard) -> Generate:
        """Return the request for an answer to its last message; `card` is of its model, which is loaded."""
        self.card = card
        self.phase = "waiting"
        self.notice = None
        self.turn = Turn(self._store, self.messages[-1], model=card.name, system=self.setup.system)
        self.turn.sampling = self.effective
        return answer_request(self.turn.id, self.setup.applied(self._session), self.messages)

    def handle(self, event: Prefill | Delta | Repeats) -> None:
        """Add to the answer. Raises SessionError if its message cannot be created."""
        turn = self.turn
        assert turn is not None
        try:
            turn.handle(event)
        finally:
            self.phase = turn.phase
            self.context_tokens = turn.context_tokens
        if isinstance(event, Delta) and turn.answer is not None:
            self.messages = [*self.messages[: -1 if self.answer is not None else None], turn.answer]

    def end(self, reason: str, summary: Summary | None) -> None:
        """Store the answer that ended. Raises SessionError: call it again then. One that is deleted gets a notice."""
        self.phase = "idle"
        if (turn := self.turn) is None:
            return
        try:
            turn.end(reason, summary)
            last = turn.answer or turn.leaf
        except DeletedError as error:
            self.notice = str(error)
            last = turn.leaf
        self.turn = None
        self.show(last.id)
