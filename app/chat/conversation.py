"""A chat without a screen: one session, one engine and the actions of a user.

The screen calls actions, calls `poll` up to ten times a second and draws the attributes. An action raises
HeadraceError and changes nothing if it is not possible; later failures appear in `notice`.

The full screen and the line chat each have one; `/compare` and `/again` (`parallel_answers.py`) take over its engine
for a while. Its parts store and count (`answer_writer.py`, `session_branch.py`, `unsent_message.py`,
`context_trimming.py`).

A question takes this way: `send` -> `_add_and_ask` -> `_ask` -> `writer.ask`; its events come through `poll`, to the
writer and then to `_handle_answer`. tests/app/chat/test_conversation.py plays actions against a scripted engine.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from msgspec import Struct
from msgspec.structs import replace

from headrace.app.answer.options import AnswerOptions
from headrace.app.chat.answer_setup import WARMER, question_of, resampled, settings_used, stored_options
from headrace.app.chat.answer_writer import AnswerPhase, AnswerWriter
from headrace.app.chat.attachments import parse_message
from headrace.app.chat.context_trimming import ContextQuestion, ContextTrimming, context_full_notice
from headrace.app.chat.prompt import summary_messages, summary_tokens
from headrace.app.chat.session_branch import SessionBranch
from headrace.app.chat.turn import Turn
from headrace.app.chat.unsent_message import UnsentMessage
from headrace.app.config.load_options import ModelSpec
from headrace.app.engine.client import ChatEngine
from headrace.app.engine.commands import Generate
from headrace.app.engine.events import (
    AnswerEvent,
    ContextFull,
    Damaged,
    Delta,
    Died,
    Done,
    Dropped,
    Event,
    Failed,
    PromptCounted,
    Ready,
    one_line,
)
from headrace.app.sessions.records import Attachment, Message, Session
from headrace.app.sessions.store import SessionStore
from headrace.runtime.errors import EngineError, HeadraceError, UsageError

_DISK_CHOICES = (
    ("again", "t", "try again: there is room now"),
    ("unsaved", "u", "go on; nothing more is saved"),
)
"""Choices after the disk of the sessions was full."""
DISK_FULL = "the disk is full"
"""Title of the question with these choices."""


class OpenQuestion(Struct, frozen=True):
    """A decision that only the user can make; both chats ask it.

    title: in a few words; no two open questions have the same.
    text: sentences.
    answers: result, key and description of each.
    resolve: carries out the result that was chosen. Raises HeadraceError.
    """

    title: str
    text: str
    answers: Sequence[tuple[str, str, str]]
    resolve: Callable[[str], None]


class Conversation:
    """One session and the actions on it.

    branch: the session and its active messages.
    writer: the answer being written.
    unsent: the text being typed.
    trimming: messages left out.
    notice: one line for the user.
    damage: of the model's files, repeated with every answer.
    spec: how models are loaded.
    """

    def __init__(
        self,
        engine: ChatEngine,
        store: SessionStore,
        session: Session | None = None,
        spec: ModelSpec = ModelSpec(),  # noqa: B008 - immutable
    ) -> None:
        """Continue a session, or begin one.

        engine: generates the answers.
        store: of all sessions.
        session: None creates one.
        spec: how its models are loaded; each has a name of its own.
        """
        self.engine = engine
        self.store = store
        self.branch = SessionBranch(store, session or store.create())
        self.writer = AnswerWriter(engine, self.branch)
        self.trimming = ContextTrimming(self.branch)
        self.unsent = UnsentMessage()
        self.notice: str | None = None
        self.damage: str | None = None
        self.spec = spec
        self._unasked: int | None = None  # id of the question to submit once a model can be loaded

    @property
    def session(self) -> Session:
        return self.branch.session

    @property
    def messages(self) -> list[Message]:
        """The active branch, first to last, the growing answer included."""
        return self.branch.messages

    @property
    def phase(self) -> AnswerPhase:
        return self.writer.phase

    @property
    def failure(self) -> str | None:
        """The reason for an engine that died or a model that could not be loaded, without a full stop at its end."""
        if self.engine.state not in ("dead", "failed"):
            return None
        return (self.notice or "the engine is not running").rstrip(".")

    @property
    def questions(self) -> list[OpenQuestion]:
        """Decisions that the user has to make: about a full context, then about a full disk."""
        questions = []
        full = self.trimming.question
        if full is not None and self.phase == "idle":
            questions.append(OpenQuestion("the context is full", full.text, full.answers, self.resolve))
        if self.store.db.full:
            text = f"The sessions in {self.store.db.path} cannot be written. What you see is kept until you quit."
            questions.append(OpenQuestion(DISK_FULL, text, _DISK_CHOICES, self.resolve_full_disk))
        return questions

    @property
    def context_limit(self) -> int | None:
        """Tokens; None until a model is loaded."""
        return self.engine.card.context_limit if self.engine.card else None

    @property
    def effective(self) -> dict[str, object]:
        """Sampling settings in effect: the session's, else the model's once it is loaded."""
        return settings_used(self.session.sampling, self.engine.card)

    @property
    def temperature(self) -> float | None:
        """The temperature in effect; None while the model's is unknown."""
        settings = self.effective
        if self.engine.card is not None:  # neither session nor model sets one: greedy
            settings.setdefault("temperature", 0.0)
        value = settings.get("temperature")
        return value if isinstance(value, float | int) else None

    @property
    def greedy(self) -> bool:
        """True if the session's settings would repeat the same answer every time."""
        return self.temperature == 0

    # --- asking ----------------------------------------------------------------------------------------------

    def send(self, text: str) -> Message:
        """Send a message; `/file` lines and `@path` mentions become attachments. Raises UsageError, EngineError."""
        self._prepare_to_ask()  # `_ask` does it again, but only after the message is stored: errors have to come before
        content, attachments = parse_message(text)
        counted = self.unsent.count_of(text)
        if counted is not None:
            needed = counted.message  # older turns could be dropped
            if all(message.role != "user" for message in self.messages[self.branch.not_sent :]):
                needed = counted.tokens
            if needed > counted.longest:
                limit = self.context_limit or counted.longest
                raise UsageError(context_full_notice(needed, limit, "shorten the message"))
        self.trimming.typed = content, text
        return self._add_and_ask(self.branch.last_id, content, attachments)

    def prefetch(self, text: str, *, count_only: bool = False) -> None:
        """Have the engine count, and prefill, the prompt that sending `text` would make."""
        if self.writer.active is not None or self.trimming.question is not None:
            return
        request = self.unsent.update(text, self.session, self.messages, count_only=count_only)
        if request is not None:
            self.engine.prefetch(request)

    def regenerate(self, message_id: int | None = None) -> None:
        """Answer the question of this message (None: the last) again, as a new branch.

        The seed is the next one, if the session has a seed. A greedy session is sampled at `WARM`, with a notice.
        """
        self._prepare_to_ask()
        question, answered = question_of(self.branch, message_id)
        if not answered:
            self._ask(question)
            return
        self._ask(question, sampling=resampled(self.branch, question, greedy=self.greedy))
        if self.greedy:
            self.notice = WARMER

    def resamplings(self, count: int) -> tuple[int, list[dict[str, object]]]:
        """Return the last question and the settings of `count` more answers. Raises UsageError, EngineError."""
        self._prepare_to_ask()
        question, _ = question_of(self.branch, None)
        return question, [resampled(self.branch, question, greedy=self.greedy, later=n) for n in range(count)]

    def edit(self, message_id: int, text: str) -> None:
        """Add a branch with another text: a question is answered at once, an answer can be continued."""
        self._require_idle()
        old = self.branch.message(message_id)
        if old.role == "user":
            self._prepare_to_ask()
            content, attachments = parse_message(text, old)
            self.trimming.typed = content, text
            self._add_and_ask(old.parent_id, content, attachments)
        else:
            added = self.store.add(
                self.session.id,
                old.parent_id,
                "assistant",
                text,
                model=old.model,
                sampling=old.sampling,
                system=old.system,
            )
            self.branch.reload(added.id)

    def continue_answer(self) -> None:
        """Continue the last answer, or answer the last message."""
        self._prepare_to_ask()
        if not self.messages:
            raise UsageError("there is nothing to continue")
        self._ask(self.messages[-1].id, continuing=self.messages[-1].role == "assistant")

    def stop(self) -> None:
        """Cancel the answer; its text is kept as partial."""
        self.engine.cancel()

    # --- branches, prompt and model --------------------------------------------------------------------------

    def switch_branch(self, message_id: int, step: int) -> None:
        """Activate the alternative `step` places after the active one at this message, or the nearest to that."""
        self._leave_branch()
        self.branch.switch(message_id, step)

    def show(self, message_id: int) -> None:
        """Activate a branch that has this message, unless the active one has it."""
        self._leave_branch()
        self.branch.show(message_id)

    def remove(self, message_id: int) -> None:
        """Remove a message of any branch and all that follow it."""
        self._leave_branch()
        self.branch.remove(message_id)

    def resolve(self, choice: str) -> None:
        """Carry out an answer to the question of `trimming`: a result of `ContextQuestion.answers`."""
        self._require_idle()
        if (question := self.trimming.question) is None:
            raise UsageError("the context is not full")
        if choice == "new":
            self._start_session(with_last=not question.during_answer)
        elif choice == "drop":
            self._ask(question.leaf, continuing=question.during_answer, drop_oldest=True)
        else:
            self._summarise(question)

    def set_summary(self, text: str) -> None:
        """Replace the summary of the messages left out. Raises UsageError if there are none."""
        self._require_idle()
        self.trimming.set_summary(text)

    def undo_trimming(self) -> None:
        """Undo the latest change of the messages left out and of their summary."""
        self._require_idle()
        self.trimming.undo()

    def check_model(self, name: str = "") -> None:
        """Check that `set_model` takes the name; without one, that it takes any. Call it before a question to the user.

        Raises UsageError if the engine is a server's, and the errors of `check_model_name`.
        """
        if self.engine.is_remote:
            raise UsageError(
                "a server's model stays", "`headrace chat --connect URL -m MODEL` takes another of its models"
            )
        if name:
            from headrace.app.chat.download_plan import check_model_name  # the catalog's reader is no part of the start

            check_model_name(name)

    def set_model(self, name: str) -> None:
        """Load another model, for the next answer on. Raises the errors of `check_model`."""
        self.check_model(name)
        self.branch.session = self.store.set_model(self.session.id, name)
        self.load_model()

    def load_model(self) -> None:
        """Start the engine with the session's model. An answer being written is kept as partial."""
        self.notice = self.damage = None
        self.engine.start(replace(self.spec, name=self.session.model))

    def restart_engine(self) -> None:
        """Start the engine again after it died or could not load a model. Raises EngineError."""
        self.notice = None
        self.engine.restart()

    def resolve_full_disk(self, choice: str) -> None:
        """Go on without saving, or try to save again. Raises SessionError."""
        if choice == "unsaved":
            self.store.go_unsaved()
        self.settle()

    def settle(self) -> None:
        """Store the last answer, if that failed when it ended. Raises SessionError as long as it fails."""
        if self.writer.is_unstored:
            self.writer.settle()
            self.notice = None

    def open(self, session: Session) -> "Conversation":
        """Close this conversation, and return that of another session. Raises SessionError; see `close`."""
        self.stop()
        self.close()
        return Conversation(self.engine, self.store, session, self.spec)

    def close(self) -> None:
        """Keep an answer being written as partial, and delete a session without messages and draft.

        Raises SessionError if the answer cannot be stored: call it again then.
        """
        if self.writer.active is not None:
            self.engine.cancel()
            self.writer.end("cancelled")
            self.writer.settle()  # keeps the notice
        self.settle()
        if not self.messages and not self.session.draft and not self.store.messages(self.session.id):
            self.store.delete(self.session.id)

    # --- steps of actions ------------------------------------------------------------------------------------

    def _require_idle(self) -> None:
        self.writer.require_inactive()
        self.settle()

    def _prepare_to_ask(self) -> None:
        self._require_idle()
        if self.engine.state in ("stopped", "dead"):  # not started yet, or it died
            self.load_model()
        if self.engine.state not in ("loading", "ready"):
            raise EngineError("the engine is not running", "restart it, or choose another model")
        stored_options(self.session.sampling)  # raises UsageError before anything is stored

    def _leave_branch(self) -> None:
        self._require_idle()
        self.trimming.question = None

    def _add_and_ask(self, parent: int | None, content: str, attachments: tuple[Attachment, ...]) -> Message:
        message = self.store.add(self.session.id, parent, "user", content, attachments=attachments)
        self.branch.reload(message.id)
        self._ask(message.id)
        return message

    def _ask(
        self,
        leaf_id: int,
        *,
        continuing: bool = False,
        drop_oldest: bool = False,
        sampling: Mapping[str, object] | None = None,
    ) -> None:
        """Submit the branch up to this message; see `AnswerWriter.ask`."""
        self._prepare_to_ask()
        self.writer.ask(leaf_id, continuing=continuing, drop_oldest=drop_oldest, sampling=sampling)
        self.trimming.question = None
        self.notice = None
        self.unsent.sent()

    def _start_session(self, *, with_last: bool) -> None:
        if with_last:
            self._prepare_to_ask()
        last = self.branch.last("user")
        self.branch.start_session()
        self.trimming.reset()
        if with_last:
            self._add_and_ask(None, last.content, last.attachments)

    def _summarise(self, question: ContextQuestion) -> None:
        self._prepare_to_ask()
        leaf = self.branch.message(question.leaf)
        turn = Turn(self.store, leaf, continuing=question.during_answer, summarising=True, dropping=True)
        longest = summary_tokens(self.context_limit)
        messages = summary_messages(self.session, self.messages, longest)
        options = AnswerOptions(max_tokens=longest, thinking=False)
        self.writer.submit(turn, Generate(turn.id, messages, options, drop_oldest=True))

    # --- engine events ---------------------------------------------------------------------------------------

    def poll(self) -> list[Event]:
        """Handle the events since the last call, and return them in order for metrics and panels."""
        events = self.engine.poll()
        for event in events:
            turn = self.writer.active  # before the event, which may end it
            with self._failure_noticed():
                if isinstance(event, AnswerEvent) and turn is not None and event.id == turn.id:
                    self.writer.handle(event)
                    self.writer.settle()  # if it has ended
                    if not isinstance(event, Delta):
                        self._handle_answer(turn, event)
                else:
                    self._handle(event)
        with self._failure_noticed():
            self.writer.save()
            if self.writer.retry_due:
                self.settle()
        return events

    @contextmanager
    def _failure_noticed(self) -> Iterator[None]:
        """Turn a failure of the store or the engine into a notice: the chat continues, and storing is tried again."""
        try:
            yield
        except HeadraceError as error:
            self.notice = one_line(str(error), error.hint)

    def _handle(self, event: Event) -> None:
        match event:
            case Died():
                self.notice = event.message
                if self.writer.active is not None:
                    self.writer.end("died")
                    self.writer.settle()
            case PromptCounted():
                if self.unsent.take_count(event) and self.writer.active is None:
                    self.branch.context_tokens = event.tokens
            case Failed(id=None):
                self.notice = one_line(event.message, event.hint)
            case Ready():
                # The question whose model could not be loaded: the one that is ready now answers it.
                unasked = self._unasked
                self._unasked = None
                if unasked is not None and unasked == self.branch.leaf and self.messages[-1].role == "user":
                    self._ask(unasked)
            case Damaged():
                self.damage = self.notice = one_line(event.message, event.hint)

    def _handle_answer(self, turn: Turn, event: AnswerEvent) -> None:
        """Handle an event of the answer, after the writer."""
        match event:
            case Dropped():
                if not turn.summarising:
                    self.trimming.dropped(event.messages)
            case ContextFull():
                self._context_full(turn, event)
            case Failed() if self.engine.state == "failed":  # the model's own Failed came with the reason
                self._unasked = self.branch.leaf
            case Failed():
                self.notice = one_line(event.message, event.hint)
            case Done():
                self._done(turn, event)
                self.notice = self.notice or self.damage

    def _done(self, turn: Turn, done: Done) -> None:
        end = done.end
        if turn.summarising:
            self._summarised(turn, cancelled=end.reason == "cancelled")
            return
        if end.ended_by == "context_limit" and turn.answer is not None:
            tokens = self.branch.context_tokens
            self._ask_to_trim(tokens, turn.answer, during_answer=True, last_turn_fits=done.last_turn_fits)

    def _context_full(self, turn: Turn, full: ContextFull) -> None:
        question = self.trimming.question
        if turn.summarising and question is not None:  # there are other choices
            self.trimming.question = replace(question, choices=("drop", "new"))
            self.notice = "the older turns are too long to be summarised"
        elif turn.dropping:
            self.trimming.question = None
            self.notice = context_full_notice(full.prompt_tokens, full.limit, "this message alone does not fit")
            self.trimming.take_back(turn.leaf)
        else:
            fits = full.last_turn_fits
            self._ask_to_trim(full.prompt_tokens, turn.leaf, during_answer=turn.continuing, last_turn_fits=fits)

    def _ask_to_trim(self, tokens: int, leaf: Message, *, during_answer: bool, last_turn_fits: bool) -> None:
        limit = self.context_limit or tokens
        notice = self.trimming.context_full(
            tokens, limit, leaf, during_answer=during_answer, last_turn_fits=last_turn_fits
        )
        self.notice = notice or self.notice

    def _summarised(self, turn: Turn, *, cancelled: bool) -> None:
        summary = turn.summary.strip()
        if not cancelled and not summary:
            self.notice = "the model gave no summary"
        elif not cancelled:
            self.trimming.trim(self.branch.last("user").id, summary)
            self._ask(turn.leaf.id, continuing=turn.continuing)
