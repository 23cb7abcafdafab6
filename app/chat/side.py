"""One side of a comparison: how it answers, its own branch of the session, and its answer as it grows."""

from typing import Any, Literal

from headrace.app.chat.answer_setup import AnswerSetup, answer_request, settings_used
from headrace.app.chat.open_session import tokens_held
from headrace.app.chat.turn import Turn
from headrace.app.engine.messages import Delta, Done, Generate, ModelCard, Prefill
from headrace.app.sessions.records import Message, Session
from headrace.app.sessions.store import SessionStore
from headrace.runtime.errors import DeletedError

SidePhase = Literal["idle", "queued", "loading", "waiting", "prefill", "answering"]


class Side:
    """messages: its branch, first to last, the growing answer included. phase: `queued` while the other side answers.

    card: its model's, once that was loaded. notice: why there is no answer, or what is wrong with it.
    """

    def __init__(self, name: str, setup: AnswerSetup, store: SessionStore, session: Session) -> None:
        self.name, self.setup = name, setup
        self.messages: list[Message] = []
        self.phase: SidePhase = "idle"
        self.card: ModelCard | None = None
        self.notice: str | None = None
        self.context_tokens = 0
        self.turn: Turn | None = None
        self._store, self._session = store, session

    @property
    def leaf(self) -> int | None:
        """Its last message."""
        return self.messages[-1].id if self.messages else None

    @property
    def effective(self) -> dict[str, Any]:
        """The settings in effect, as far as its model is known."""
        return settings_used(self.setup.sampling, self.card)

    @property
    def answer(self) -> Message | None:
        """Its last answer, or what there is of it; None while there is only the question."""
        last = self.messages[-1] if self.messages else None
        return last if last is not None and last.role == "assistant" else None

    def show(self, leaf: int | None) -> None:
        """Its branch from now on."""
        self.messages = self._store.branch(self._session.id, leaf) if leaf is not None else []
        last = next((message for message in reversed(self.messages) if message.metrics is not None), None)
        self.context_tokens = 0
        if last is not None and (went := last.metrics) is not None:
            self.context_tokens = tokens_held(went.prompt_tokens, went.completion_tokens, last.finish_reason)

    def begin(self, card: ModelCard) -> Generate:
        """The request for an answer to its last message; its model is loaded."""
        self.card, self.phase, self.notice = card, "waiting", None
        self.turn = Turn(self._store, self.messages[-1], model=card.name, system=self.setup.system)
        self.turn.sampling = self.effective
        return answer_request(self.turn.id, self.setup.applied(self._session), self.messages)

    def take(self, event: Prefill | Delta) -> None:
        """Its answer goes on. Raises SessionError where the message cannot be begun."""
        turn = self.turn
        assert turn is not None
        if isinstance(event, Prefill):
            self.context_tokens = event.reused + event.total + 1  # the prompt's last token is fed by the first step
            self.phase = "prefill"
            return
        self.phase = "answering"
        self.context_tokens += sum(record.tokens for record in event.records)
        if event.text:
            turn.grow(event.text)
            if turn.answer is not None:
                self.messages = [*self.messages[: -1 if self.answer is not None else None], turn.answer]

    def end(self, reason: str, done: Done | None) -> None:
        """Its answer is over. Raises SessionError where it cannot be stored: to be called again then, but after a
        DeletedError."""
        self.phase = "idle"
        if (turn := self.turn) is None:
            return
        try:
            turn.end(reason, done)
        except DeletedError:
            self.turn = None
            self.show(turn.leaf.id)
            raise
        self.turn = None
        self.show(turn.answer.id if turn.answer is not None else turn.leaf.id)
