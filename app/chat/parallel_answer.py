"""One of several answers to the same question, on a branch of its own."""

from typing import Literal

from headrace.app.chat.answer_setup import AnswerSetup, answer_request, settings_used
from headrace.app.chat.session_branch import cached_tokens
from headrace.app.chat.turn import Turn, TurnPhase
from headrace.app.engine.commands import Generate
from headrace.app.engine.events import Event
from headrace.app.engine.model_card import ModelCard
from headrace.app.sessions.records import Message, Session
from headrace.app.sessions.store import SessionStore
from headrace.runtime.errors import DeletedError

AnswerPhase = Literal["idle", "queued", "loading"] | TurnPhase


class ParallelAnswer:
    """messages: its branch, first to last, the growing answer included. phase: `queued` while another one is written.

    card: its model's, once loaded. notice: the reason for a missing answer, or a problem with it. turn: its generation,
    until that is stored.
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
    def effective(self) -> dict[str, object]:
        """The sampling settings in effect, as far as its model is known."""
        return settings_used(self.setup.sampling, self.card)

    @property
    def repeats(self) -> bool:
        """True if it is being written and has repeated itself for a long time."""
        return self.turn is not None and self.turn.repeats

    @property
    def unstored(self) -> bool:
        """True if it ended and could not be stored."""
        return self.turn is not None and self.turn.reason is not None

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
        self.turn = Turn(
            self._store, self.messages[-1], model=card.name, system=self.setup.system, sampling=self.effective
        )
        return answer_request(self.turn.id, self.setup.applied(self._session), self.messages)

    def handle(self, event: Event) -> None:
        """Add to the answer. Raises SessionError if its message cannot be created."""
        turn = self.turn
        assert turn is not None
        try:
            turn.handle(event)
        finally:
            self.phase = turn.phase if turn.reason is None else "idle"
            self.context_tokens = turn.context_tokens
        self.messages = turn.grown(self.messages)

    def end(self, reason: str) -> None:
        """Set the end of the answer, which `settle` stores."""
        self.phase = "idle"
        if self.turn is not None:
            self.turn.end(reason)

    def settle(self) -> None:
        """Store an answer that ended. Raises SessionError: call it again then. One that is deleted gets a notice."""
        if (turn := self.turn) is None or turn.reason is None:
            return
        try:
            turn.settle()
            last = turn.answer or turn.leaf
        except DeletedError as error:
            self.notice = str(error)
            last = turn.leaf
        self.turn = None
        self.show(last.id)
