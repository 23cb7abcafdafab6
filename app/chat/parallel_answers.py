"""Several answers on branches of their own, generated and stored independently: shared by `/compare` and `/again`.

While there are such answers, their `poll` replaces the conversation's. `take` or `close` ends them. A subclass decides
when each answer is submitted; storing, retries and notices are here.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Literal

from headrace.app.chat.answer_setup import AnswerSetup, answer_request, settings_used
from headrace.app.chat.context_trimming import context_full_notice
from headrace.app.chat.conversation import Conversation
from headrace.app.chat.session_branch import cached_tokens
from headrace.app.chat.turn import Turn, TurnPhase
from headrace.app.engine.commands import Generate
from headrace.app.engine.events import ContextFull, Event, Failed, one_line
from headrace.app.engine.model_card import ModelCard
from headrace.app.sessions.records import Message, Session
from headrace.app.sessions.store import SessionStore
from headrace.runtime.errors import DeletedError, EngineError, SessionError

AnswerPhase = Literal["idle", "queued", "loading"] | TurnPhase


class ParallelAnswer:
    """One of several answers, on a branch of its own.

    messages: its branch, first to last, the growing answer included.
    phase: `queued` while another one is written.
    card: its model's, once loaded.
    notice: the reason for a missing answer, or a problem with it.
    context_tokens: of the prompt, then KV cache entries.
    turn: its generation, until that is stored.
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


ParallelPhase = Literal["idle", "waiting", "prefill", "answering"]
ParallelEvent = tuple[ParallelAnswer | None, Event]
"""An engine event and the answer that it is about."""


class ParallelAnswers(ABC):
    """answers: in the order in which they are shown. notice: one line about all of them.

    ids: of the generations that run at the same time; empty if the answers take turns.
    """

    answers: Sequence[ParallelAnswer]
    ids: tuple[int, ...] = ()

    def __init__(self, conversation: Conversation) -> None:
        """Raises EngineError while an answer is being written, SessionError if one cannot be stored."""
        if conversation.phase != "idle":
            raise EngineError("an answer is being written", "stop it first")
        conversation.settle()
        self.notice: str | None = None
        self._conversation = conversation
        self._store = conversation.store
        # The last message of the conversation's branch, to which `take(None)` returns.
        self._before = conversation.messages[-1].id if conversation.messages else None

    @property
    @abstractmethod
    def phase(self) -> ParallelPhase:
        """The phase of the most advanced answer."""

    @abstractmethod
    def poll(self) -> list[ParallelEvent]:
        """Handle the events since the last call, and return them in order."""

    @abstractmethod
    def take(self, answer: ParallelAnswer | None) -> None:
        """Continue the conversation with this answer; None: as it was before.

        The other answers stay as branches. Raises SessionError if an answer cannot be stored.
        """

    @abstractmethod
    def close(self) -> None:
        """End all answers and keep them as partial. Raises SessionError: call it again then."""

    def _handle_own(self, answer: ParallelAnswer, event: Event) -> None:
        """Handle an event of this answer's generation. Raises SessionError if it cannot be stored."""
        match event:
            case Failed():
                answer.notice = one_line(event.message, event.hint)
            case ContextFull():
                hint = "leave out older turns in the chat"
                answer.notice = context_full_notice(event.prompt_tokens, event.limit, hint)
        answer.handle(event)
        if answer.phase == "idle":
            self._ended(answer)

    def _end(self, answer: ParallelAnswer, reason: str) -> None:
        """End an answer, and store it. Raises SessionError if that fails; `_save` tries again."""
        answer.end(reason)
        self._ended(answer)

    def _ended(self, answer: ParallelAnswer) -> None:
        """Store an answer that ended, after an event or `_end`."""
        self._store_ended(answer)

    def _store_ended(self, answer: ParallelAnswer) -> None:
        turn = answer.turn
        answer.settle()
        if turn is not None and turn.metrics is not None and not any(each.unstored for each in self.answers):
            self.notice = None

    def _settle(self) -> None:
        """Store the answers that ended. Raises SessionError as long as one fails."""
        for answer in self.answers:
            self._store_ended(answer)

    def _save(self) -> None:
        """Store the text that arrived, and retry answers that could not be stored; failures become the notice."""
        for answer in self.answers:
            if (turn := answer.turn) is None:
                continue
            with self._failure_noticed():
                if turn.reason is None:
                    turn.save()
                elif turn.retry_due:
                    self._store_ended(answer)

    @contextmanager
    def _failure_noticed(self) -> Iterator[None]:
        try:
            yield
        except SessionError as error:
            self.notice = one_line(str(error), error.hint)

    def _activate(self, leaf: int | None) -> None:
        """Show the branch that ends with this message in the conversation, or the rest of a deleted one."""
        branch = self._conversation.branch
        try:
            if leaf is not None:
                self._store.activate(self._store.message(leaf))
            branch.reload(leaf)
        except DeletedError as error:
            self._conversation.notice = str(error)
            with suppress(DeletedError):
                branch.reload(self._store.session(branch.session.id).active_leaf)
