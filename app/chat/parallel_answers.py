"""Several answers on branches of their own, generated and stored independently: shared by `/compare` and `/again`.

While there are such answers, their `poll` replaces the conversation's.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Literal, ParamSpec

from headrace.app.chat.context_question import context_full_notice
from headrace.app.chat.conversation import Conversation
from headrace.app.chat.parallel_answer import ParallelAnswer
from headrace.app.chat.unstored_answers import UnstoredAnswers
from headrace.app.engine.events import Abandoned, ContextFull, Delta, Done, Event, Failed, Prefill, Repeats, one_line
from headrace.runtime.errors import DeletedError, EngineError, SessionError
from headrace.runtime.metrics.telemetry import Summary

P = ParamSpec("P")
Phase = Literal["idle", "waiting", "prefill", "answering"]
AnswerEvent = tuple[ParallelAnswer | None, Event]
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
        self._conversation, self._store = conversation, conversation.store
        self._before = conversation.messages[-1].id if conversation.messages else None
        self._unstored = UnstoredAnswers()

    @property
    @abstractmethod
    def phase(self) -> Phase:
        """The phase of the most advanced answer."""

    @abstractmethod
    def poll(self) -> list[AnswerEvent]:
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
        """Handle an event of this answer's generation."""
        match event:
            case Prefill() | Delta() | Repeats():
                answer.handle(event)
            case Done():
                self._end(answer, event.end.reason, event.end.summary)
            case Failed():
                answer.notice = one_line(event.message, event.hint)
                self._end(answer, "failed")
            case ContextFull():
                hint = "leave out older turns in the chat"
                answer.notice = context_full_notice(event.prompt_tokens, event.limit, hint)
                self._end(answer, "length")
            case Abandoned():
                self._end(answer, "cancelled")

    def _end(self, answer: ParallelAnswer, reason: str, summary: Summary | None = None) -> None:
        """Store an answer that ended. Raises SessionError if that fails; `_save` tries again."""
        self._add_ended(answer, reason, summary)
        self._unstored.settle()

    def _add_ended(self, answer: ParallelAnswer, reason: str, summary: Summary | None = None) -> None:
        answer.phase = "idle"
        self._unstored.add(partial(self._store_ended, answer, reason, summary))

    def _store_ended(self, answer: ParallelAnswer, reason: str, summary: Summary | None) -> None:
        answer.end(reason, summary)
        if len(self._unstored) == 1 and summary is not None:
            self.notice = None

    def _save(self) -> None:
        """Store the text that arrived, and retry answers that could not be stored; failures become the notice."""
        for answer in self.answers:
            if answer.turn is not None and answer.phase != "idle":
                self._or_notice(answer.turn.save)
        if self._unstored.retry_due:
            self._or_notice(self._unstored.settle)

    def _or_notice(self, action: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            action(*args, **kwargs)
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
