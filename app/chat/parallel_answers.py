"""Several answers on branches of their own, generated and stored independently: shared by `/compare` and `/again`.

While there are such answers, their `poll` replaces the conversation's. `take` or `close` ends them. `/again` has all of
them written at the same time (`candidates.py`), `/compare` one after the other and with two models (`comparison.py`).

    ask -> queue -> _next: running, while its model is loading, then as its `Turn` says -> _end: stored, then _next

tests/app/chat/test_candidates.py, test_comparison.py and test_comparison_engines.py guard this.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Literal

from msgspec.structs import replace

from headrace.app.chat.answer_setup import AnswerSetup, settings_used
from headrace.app.chat.answer_writer import AnswerPhase, AnswerWriter
from headrace.app.chat.context_trimming import context_full_notice
from headrace.app.chat.conversation import Conversation
from headrace.app.chat.session_branch import SessionBranch
from headrace.app.engine.client import ChatEngine
from headrace.app.engine.events import AnswerEvent, ContextFull, Damaged, Died, Event, Failed, Ready, one_line
from headrace.app.engine.model_card import ModelCard
from headrace.app.sessions.records import Message, Session
from headrace.runtime.errors import DeletedError, HeadraceError, SessionError


class ParallelAnswer(AnswerWriter):
    """One of several answers, on a branch of its own.

    pending: it is `queued` while another one is written, or its model is `loading`; None: neither.
    card: its model's, once loaded.
    notice: the reason for a missing answer, or a problem with it.
    """

    def __init__(self, name: str, setup: AnswerSetup, conversation: Conversation) -> None:
        super().__init__(conversation.engine, SessionBranch(conversation.store, conversation.session))
        self.name = name
        self.setup = setup
        self.pending: Literal["queued", "loading"] | None = None
        self.card: ModelCard | None = None
        self.notice: str | None = None

    @property
    def phase(self) -> AnswerPhase:
        return self.pending or super().phase

    @property
    def session(self) -> Session:
        return self.setup.applied(self.branch.session)

    @property
    def messages(self) -> list[Message]:
        """Its branch, first to last, the growing answer included."""
        return self.branch.messages

    @property
    def leaf(self) -> int | None:
        """Id of its last message."""
        return self.branch.last_id

    @property
    def effective(self) -> dict[str, object]:
        """The sampling settings in effect, as far as its model is known."""
        return settings_used(self.setup.sampling, self.card)

    @property
    def answer(self) -> Message | None:
        """The last message if it is an answer, complete or not."""
        if self.messages and self.messages[-1].role == "assistant":
            return self.messages[-1]
        return None

    def end(self, reason: str) -> None:
        self.pending = None
        super().end(reason)


ParallelEvent = tuple[ParallelAnswer | None, Event]
"""An engine event and the answer that it is about; None: it is about several, or none."""


class ModelEngine:
    """An engine and the model it loaded last, None if it has none."""

    def __init__(self, engine: ChatEngine, model: str | None = None) -> None:
        self.engine = engine
        self.model = model


class ParallelAnswers(ABC):
    """A queue of answers, of which so many run at the same time.

    answers: in the order in which they are shown.
    notice: one line about all of them.
    ids: of the generations, if all answers are of one batch; else empty.
    """

    def __init__(self, conversation: Conversation, max_running: int) -> None:
        """Raises EngineError while an answer is being written, SessionError if one cannot be stored."""
        conversation.writer.require_inactive()
        conversation.settle()
        self.answers: Sequence[ParallelAnswer] = ()
        self.notice: str | None = None
        self.ids: tuple[int, ...] = ()
        self._conversation = conversation
        self._store = conversation.store
        self._max_running = max_running
        self._queue: list[ParallelAnswer] = []
        self._running: list[ParallelAnswer] = []  # loading, or being written
        loaded_model = None
        if conversation.engine.state in ("loading", "ready"):
            loaded_model = AnswerSetup.of(conversation.session).model_name
        self._main = ModelEngine(conversation.engine, loaded_model)
        self._engines: dict[ParallelAnswer, ModelEngine] = {}  # by answer; most share the main one
        # The last message of the conversation's branch, to which `take(None)` returns.
        self._before = conversation.branch.last_id

    @property
    def phase(self) -> AnswerPhase:
        """The phase of the most advanced answer."""
        phases = {answer.phase for answer in self._running}
        if "answering" in phases:
            return "answering"
        if "prefill" in phases:
            return "prefill"
        if phases:
            return "waiting"
        return "idle"

    def stop(self) -> None:
        """Cancel the answers that run; their text is kept as partial, and others of the queue are next."""
        loading = [answer for answer in self._running if answer.phase == "loading"]
        self._cancel([answer for answer in self._running if answer not in loading])
        self._end_all(loading, "cancelled")

    @abstractmethod
    def take(self, answer: ParallelAnswer | None) -> None:
        """Continue the conversation with this answer; None: as it was before.

        The other answers stay as branches. Raises SessionError if an answer cannot be stored.
        """

    def close(self) -> None:
        """End all answers and keep them as partial. Raises SessionError: call it again then."""
        self._queue.clear()
        self._cancel(self._running)
        for answer in self._running:
            answer.end("cancelled")
        self._running.clear()
        self._settle()

    def _cancel(self, answers: Sequence[ParallelAnswer]) -> None:
        for engine in dict.fromkeys(self._engines[answer] for answer in answers):  # each once
            engine.engine.cancel()

    def _share_main(self) -> None:
        """Have all answers use the conversation's engine."""
        self._engines = dict.fromkeys(self.answers, self._main)

    # --- engine events ---------------------------------------------------------------------------------------

    def poll(self) -> list[ParallelEvent]:
        """Handle the events since the last call, and return them in order."""
        events: list[ParallelEvent] = []
        for engine in list(dict.fromkeys(self._engines.values())):  # each once
            for event in engine.engine.poll():
                subject = self._subject(engine, event)
                events.append((subject, event))
                with self._failure_noticed():
                    self._handle(engine, subject, event)
        self._save()
        return events

    def _running_on(self, engine: ModelEngine) -> list[ParallelAnswer]:
        return [answer for answer in self._running if self._engines[answer] is engine]

    def _subject(self, engine: ModelEngine, event: Event) -> ParallelAnswer | None:
        """Return the running answer that an event is about: by its id, else the only one of this engine."""
        running = self._running_on(engine)
        if isinstance(event, AnswerEvent) and event.id is not None:
            return next((answer for answer in running if answer.turn and answer.turn.id == event.id), None)
        return running[0] if len(running) == 1 else None

    def _handle(self, engine: ModelEngine, subject: ParallelAnswer | None, event: Event) -> None:
        state = engine.engine.state  # a restarted engine may still send events of the process before
        match event:
            case Damaged():
                self.notice = one_line(event.message, event.hint)
            case Ready() if state == "ready":
                for answer in self._running_on(engine):
                    if answer.phase == "loading":
                        self._submit(answer)
            case Failed(id=None):
                if state == "failed":
                    self._load_failed(engine, one_line(event.message, event.hint))
            case Died() if state == "dead":
                engine.model = None
                self._end_all(self._running_on(engine), "died", event.message)
            case _ if subject is not None and isinstance(event, AnswerEvent):
                self._handle_own(subject, event)

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

    def _load_failed(self, engine: ModelEngine, reason: str) -> None:
        engine.model = None
        self._end_all(self._running_on(engine), "failed", reason)

    def _end_all(self, answers: Sequence[ParallelAnswer], reason: str, notice: str | None = None) -> None:
        """End and store answers. `_save` tries again to store those that cannot be stored now."""
        for answer in answers:
            answer.notice = notice
            with self._failure_noticed():
                answer.end(reason)
                self._ended(answer)

    # --- the queue -------------------------------------------------------------------------------------------

    def _ask(self, answers: Sequence[ParallelAnswer]) -> None:
        self.notice = None
        for answer in answers:
            answer.pending = "queued"
            answer.notice = None
        self._queue = list(answers)
        self._next()

    def _next(self) -> None:
        """Start answers of the queue, if more may run."""
        while self._queue and len(self._running) < self._max_running:
            answer = self._queue.pop(0)
            self._running.append(answer)
            engine = self._engine_for(answer)
            wanted = answer.setup.model_name
            # The model is ready, on its way for another answer, or has to be loaded. `Ready` submits the latter two.
            if engine.model == wanted and engine.engine.state == "ready":
                self._submit(answer)
                continue
            answer.pending = "loading"
            if engine.model != wanted or engine.engine.state != "loading":
                engine.model = wanted
                engine.engine.start(replace(self._conversation.spec, name=answer.setup.model))

    def _engine_for(self, answer: ParallelAnswer) -> ModelEngine:
        """Return the engine of an answer that is next."""
        return self._engines[answer]

    def _submit(self, answer: ParallelAnswer) -> None:
        engine = self._engines[answer].engine
        for other in self._engines.values():
            if other.engine is not engine:
                other.engine.rest()  # its idle work would slow this answer down
        answer.pending = None
        answer.notice = None
        answer.engine = engine
        answer.card = engine.card
        try:
            answer.ask(answer.messages[-1].id)
        except HeadraceError as error:
            self._end_all([answer], "failed", str(error))

    def _ended(self, answer: ParallelAnswer) -> None:
        """Store an answer that ended, and start the next one."""
        self._running.remove(answer)
        try:
            self._store_ended(answer)
        finally:
            self._next()

    # --- storing ---------------------------------------------------------------------------------------------

    def _store_ended(self, answer: ParallelAnswer) -> None:
        turn = answer.turn
        if turn is None:
            return
        try:
            answer.settle()
        except DeletedError as error:
            answer.notice = str(error)
            with suppress(DeletedError):  # the session may be gone, too
                answer.branch.reload(turn.leaf.id)
                if not answer.branch.messages:  # the question is gone, too
                    answer.branch.reload(None)
        if turn.metrics is not None and not any(each.is_unstored for each in self.answers):
            self.notice = None

    def _settle(self) -> None:
        """Store the answers that ended. Raises SessionError as long as one fails."""
        for answer in self.answers:
            self._store_ended(answer)

    def _save(self) -> None:
        """Store the text that arrived, and retry answers that could not be stored; failures become the notice."""
        for answer in self.answers:
            with self._failure_noticed():
                answer.save()
                if answer.retry_due:
                    self._store_ended(answer)

    @contextmanager
    def _failure_noticed(self) -> Iterator[None]:
        try:
            yield
        except SessionError as error:
            self.notice = one_line(str(error), error.hint)

    def _activate(self, answer: ParallelAnswer | None) -> None:
        """Show this answer's branch in the conversation, or the rest of a deleted one; None: the branch of before."""
        branch = self._conversation.branch
        leaf = self._before
        if answer is not None:
            leaf = answer.leaf
        try:
            if leaf is not None:
                self._store.activate(self._store.message(leaf))
            branch.reload(leaf)
        except DeletedError as error:
            self._conversation.notice = str(error)
            with suppress(DeletedError):  # the session may be gone, too
                branch.reload(self._store.session(branch.session.id).active_leaf)
