"""A chat without a screen: one session, one engine, and everything a person can do with them.

The UI calls the methods below, calls `poll` up to ten times a second and draws what the attributes say. Every message
is in the store before the engine hears of it; how an answer gets there is `turn`'s business. Actions raise
HeadraceError with nothing changed; what goes wrong later ends up in `notice`.
"""

import time
from collections.abc import Callable
from typing import Any, Literal, ParamSpec

from headrace.app.chat.answer_setup import answer_request, settings_used
from headrace.app.chat.attachments import parse_message
from headrace.app.chat.context_question import ContextChoice, ContextQuestion, context_full_notice
from headrace.app.chat.draft import Draft
from headrace.app.chat.open_session import OpenSession, tokens_held
from headrace.app.chat.prompt import runs, summary_messages, summary_tokens
from headrace.app.chat.turn import RETRY_S, Turn
from headrace.app.engine.client import ChatEngine
from headrace.app.engine.messages import (
    Abandoned,
    ContextFull,
    Damaged,
    Delta,
    Died,
    Done,
    DraftCounted,
    Dropped,
    Event,
    Failed,
    Generate,
    ModelSpec,
    Prefill,
    PrefixCached,
)
from headrace.app.sampling_options import CHAT_SAMPLING
from headrace.app.sessions.records import Attachment, Message, Session
from headrace.app.sessions.store import SessionStore
from headrace.models.text.thinking import split_thinking
from headrace.runtime.errors import EngineError, SessionError, UsageError

Phase = Literal["idle", "waiting", "prefill", "answering", "summarising"]
P = ParamSpec("P")


class Conversation(OpenSession):
    """One session being talked to.

    messages: the active branch, first to last, the growing answer included. context_tokens: of prompt and answer, as
    last known. draft: what is being typed, as it would be sent. returned: what was typed
    of a message that does not fit the context, for the input to take back. question: set while the user has to choose,
    see `resolve`. notice: one line the user should see.
    """

    def __init__(
        self, engine: ChatEngine, store: SessionStore, session: Session | None = None, *, context: int | None = None
    ) -> None:
        """`session` None begins a new one. `context`: the limit to load models with, None for what memory allows."""
        super().__init__(store, session if session is not None else store.create())
        self.engine = engine
        self.phase: Phase = "idle"
        self.question: ContextQuestion | None = None
        self.notice: str | None = None
        self.damage: str | None = None  # of the model's files: said again with every answer
        self.draft = Draft()
        self.returned: str | None = None
        self._typed = "", ""  # content of the last message, and the text it was taken from
        self._context = context
        self._turn: Turn | None = None
        self._unstored: tuple[Turn, str, Done | None] | None = None  # an answer that ended, until the store has it
        self._try_again = 0.0
        self._left_out: list[tuple[int | None, str]] = []  # prompt_from and summary as they were before each change

    # --- what the screen shows -------------------------------------------------------------------------------

    @property
    def context_limit(self) -> int | None:
        """Tokens; None until a model is loaded."""
        return self.engine.card.context_limit if self.engine.card else None

    @property
    def effective(self) -> dict[str, Any]:
        """The sampling settings in effect: the session's, the model's as far as it is loaded, the chat's own."""
        return settings_used(self.session.sampling, self.engine.card)

    @property
    def _repeats(self) -> bool:
        return not self.effective.get("temperature")

    # --- what a person does ----------------------------------------------------------------------------------

    def send(self, text: str) -> Message:
        """Say something; `/file` lines and `@path` mentions become attachments. Raises UsageError, EngineError."""
        self._ready_to_ask()
        content, attachments = parse_message(text)
        draft = self.draft.count_of(text)
        if draft is not None and draft.tokens > draft.longest and self._alone:
            raise UsageError(
                context_full_notice(draft.tokens, self.context_limit or draft.longest, "shorten the message")
            )
        self._typed = content, text
        return self._add_and_ask(self.messages[-1].id if self.messages else None, content, attachments)

    @property
    def _alone(self) -> bool:
        """Whether nothing stands before what is said next that could be left out."""
        return all(message.role != "user" for message in self.messages[self.not_sent :])

    def read_ahead(self, draft: str, *, count_only: bool = False) -> None:
        """The engine may count, and read, what will be sent if `draft`, as it stands, is what is said next."""
        if self._turn is not None or self.question is not None:
            return
        if (command := self.draft.ask(draft, self.session, self.messages, count_only=count_only)) is not None:
            self.engine.read_ahead(command)

    def stop(self) -> None:
        """End the answer; what was said is kept as partial."""
        self.engine.cancel()

    def regenerate(self, message_id: int | None = None) -> None:
        """Another answer in the place of this one, or to this question, as a new branch. None: the last message.

        It is sampled anew: with the seed after the last one where the session has a seed, and at the chat's own
        temperature where the session's is 0, which `notice` says.
        """
        self._ready_to_ask()
        if not self.messages:
            raise UsageError("nothing was asked yet")
        again = self.messages[-1] if message_id is None else self.message(message_id)
        question = again.id if again.role == "user" else again.parent_id
        if question is None:
            raise UsageError("no question stands before this answer")
        answered = any(message.parent_id == question for message in self.messages)
        self._ask(question, sampling=self._sampled_anew(question) if answered else None)
        if answered and self._repeats:
            self.notice = f"temperature 0 would repeat the answer: sampled at {CHAT_SAMPLING['temperature']}"

    def _sampled_anew(self, question: int) -> dict[str, Any]:
        """The session's settings for one more answer to this question."""
        sampling = dict(self.session.sampling)
        if self._repeats:
            sampling |= CHAT_SAMPLING
        if (seed := sampling.get("seed")) is not None:
            answer = next(message for message in self.messages if message.parent_id == question)
            sampling["seed"] = (seed + len(self.store.alternatives(answer))) % 2**64
        return sampling

    def edit(self, message_id: int, text: str) -> None:
        """A new branch with another text: a user message is answered at once, an answer can be continued."""
        self._idle()
        old = self.message(message_id)
        if old.role == "user":
            self._ready_to_ask()
            content, attachments = parse_message(text, old)
            self._typed = content, text
            self._add_and_ask(old.parent_id, content, attachments)
        else:
            how: dict[str, Any] = {"model": old.model, "sampling": old.sampling, "system": old.system}
            self.reload(self.store.add(self.session.id, old.parent_id, "assistant", text, **how).id)

    def continue_answer(self) -> None:
        """Go on where the last answer ended; a last message without an answer is answered."""
        self._ready_to_ask()
        if not self.messages:
            raise UsageError("there is nothing to continue")
        self._ask(self.messages[-1].id, continuing=self.messages[-1].role == "assistant")

    def load_model(self) -> None:
        """Start the engine with the session's model. An answer being written is kept as partial."""
        self.notice = self.damage = None
        self.engine.start(ModelSpec(self.session.model, self._context))

    def set_model(self, name: str) -> None:
        """Go on with another model, from this session's next answer on. Raises what `check_model_name` does."""
        from headrace.app.chat.model_names import check_model_name  # the catalog's reader is no part of the start

        check_model_name(name)
        self.session = self.store.set_model(self.session.id, name)
        self.load_model()

    def resolve(self, choice: ContextChoice) -> None:
        """Answer `question`: drop the oldest turns, put a summary in their place, or go on in a new session."""
        self._idle()
        if (question := self.question) is None:
            raise UsageError("the context is not full")
        if choice == "new":
            self._begin_anew(with_last=not question.during_answer)
        elif choice == "drop":
            self._ask(question.leaf, continuing=question.during_answer, drop_oldest=True)
        else:
            self._summarise(question)

    def set_summary(self, text: str) -> None:
        """Have this sent in the place of the messages that are left out. Raises UsageError where none are."""
        self._idle()
        if not self.not_sent:
            raise UsageError("all messages are sent: there is no summary")
        self._leave_out(self.session.prompt_from, text.strip())

    def undo_leaving_out(self) -> None:
        """Take back the latest change of what is left out and of the summary; what came before this start, at once."""
        self._idle()
        if not self.not_sent and not self._left_out:
            raise UsageError("all messages are sent: there is nothing to undo")
        before, summary = self._left_out.pop() if self._left_out else (None, "")
        self.session = self.store.set_prompt_from(self.session.id, before, summary)

    def close(self) -> None:
        """Leave: an answer being written is kept as partial, a session nothing was said in goes away.

        Raises SessionError where the answer cannot be stored: to be called again then.
        """
        if self._turn is not None:
            self.engine.cancel()
            self._end_turn(self._turn, "cancelled")
        self.settle()
        if not self.messages and not self.store.messages(self.session.id):
            self.store.delete(self.session.id)

    # --- what the engine says --------------------------------------------------------------------------------

    def poll(self) -> list[Event]:
        """Take in what happened since the last call; the events are also returned, in order, for metrics and panels."""
        events = self.engine.poll()
        for event in events:
            self._or_notice(self._take, event)
        if self._turn is not None:
            self._or_notice(self._turn.save)
        elif self._unstored is not None and time.monotonic() >= self._try_again:
            self._or_notice(self.settle)
        return events

    def settle(self) -> None:
        """Store the last answer, if that failed when it ended. Raises SessionError as long as it fails."""
        if self._unstored is not None:
            self._store_answer(*self._unstored)
            self.notice = None

    def _or_notice(self, action: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """A store that fails (a full disk) is said so and tried again; the chat goes on without it."""
        try:
            action(*args, **kwargs)
        except SessionError as error:
            self.notice = str(error)

    def _take(self, event: Event) -> None:
        turn = self._turn
        match event:
            case Died():
                self.notice = event.message
                if turn is not None:
                    self._end_turn(turn, "died")
            case DraftCounted():
                self.draft.take(event)
            case PrefixCached():
                if turn is None:
                    self.context_tokens = event.tokens + 1  # the prompt's last token is fed by the first step
            case Failed(id=None):
                self.notice = _one_line(event)
            case Damaged():
                self.damage = self.notice = _one_line(event)
            case Prefill() | Delta() | Done() | Dropped() | ContextFull() | Failed() | Abandoned():
                if turn is not None and event.id == turn.id:
                    self._take_own(turn, event)

    def _take_own(self, turn: Turn, event: Prefill | Delta | Done | Dropped | ContextFull | Failed | Abandoned) -> None:
        match event:
            case Prefill():
                self.context_tokens = event.reused + event.total + 1
                if self.phase == "waiting":
                    self.phase = "prefill"
            case Delta():
                self._grow(turn, event)
            case Dropped():
                if not turn.summarising:
                    self._stop_sending(event.messages)
            case ContextFull():
                self._end_turn(turn, "length")
                if turn.summarising:  # the question stays: there are other answers
                    self.notice = "the older turns are too long to be summarised"
                elif turn.dropping:
                    self.question = None
                    self.notice = context_full_notice(
                        event.prompt_tokens, event.limit, "the last turn alone is too long"
                    )
                    self._take_back(turn.leaf)
                else:
                    self._ask_what_goes(event.prompt_tokens, turn.leaf, during_answer=turn.continuing)
            case Failed():
                self._end_turn(turn, "failed")
                self.notice = _one_line(event)
            case Abandoned():
                self._end_turn(turn, "cancelled")
            case Done():
                self._done(turn, event)
                self.notice = self.notice or self.damage

    def _grow(self, turn: Turn, delta: Delta) -> None:
        grown = self.context_tokens + len(delta.records)
        self.context_tokens = grown if self.context_limit is None else min(grown, self.context_limit)
        if not turn.summarising:
            self.phase = "answering"
        if turn.answer is None and turn.sampling is not None:
            turn.sampling = settings_used(turn.sampling, self.engine.card)
        if delta.text:
            turn.grow(delta.text, self._speaker)
            self._show(turn)

    def _done(self, turn: Turn, done: Done) -> None:
        tokens = tokens_held(done.summary.prompt_tokens, done.summary.completion_tokens, done.reason)
        if turn.summarising:
            self._summarised(turn, cancelled=done.reason == "cancelled")
            return
        self._end_turn(turn, done.reason, done)
        self.context_tokens = tokens
        if done.context_full and turn.answer is not None:
            self._ask_what_goes(tokens, turn.answer, during_answer=True)

    def _show(self, turn: Turn) -> None:
        """Put the growing answer at the end of the branch."""
        if turn.answer is not None:
            if self.messages[-1].id == turn.answer.id:
                self.messages[-1] = turn.answer
            else:
                self.messages.append(turn.answer)

    def _end_turn(self, turn: Turn, reason: str, done: Done | None = None) -> None:
        self._turn, self.phase = None, "idle"
        self._store_answer(turn, reason, done)

    def _store_answer(self, turn: Turn, reason: str, done: Done | None) -> None:
        self._unstored, self._try_again = (turn, reason, done), time.monotonic() + RETRY_S
        turn.end(reason, done)
        self._unstored = None
        tokens = self.context_tokens
        self.reload(self.leaf if turn.answer is None else turn.answer.id)
        self.context_tokens = tokens

    # --- the full context ------------------------------------------------------------------------------------

    def _ask_what_goes(self, tokens: int, leaf: Message, *, during_answer: bool) -> None:
        limit = self.context_limit or tokens
        turns = sum(message.role == "user" for message in self.messages[self.not_sent :])
        if turns > 1:
            self.question = ContextQuestion(tokens, limit, during_answer, leaf.id)
        else:
            summed_up = self.session.summary and self.not_sent
            why = "there is only the summary before it" if summed_up else "nothing older is left to drop"
            self.notice = context_full_notice(tokens, limit, why)
            self._take_back(leaf)

    def _take_back(self, leaf: Message) -> None:
        """A message that cannot be sent goes back to the input: left here, it would be sent with all that follow."""
        answered = any(message.parent_id == leaf.id for message in self.store.messages(self.session.id))
        if leaf.role == "user" and not answered:
            self.store.take_back(leaf)
            self.reload(leaf.parent_id)
            self.returned = self._typed[1] if self._typed[0] == leaf.content else leaf.content

    def _stop_sending(self, count: int) -> None:
        """The engine left out the first `count` of the messages it was sent."""
        first = runs(self.session, self.messages)[count][0]
        self._leave_out(first.id, self.session.summary)

    def _leave_out(self, first: int | None, summary: str) -> None:
        """Send no message before `first`, and the summary in their place; `undo_leaving_out` takes it back."""
        self._left_out.append((self.session.prompt_from, self.session.summary))
        self.session = self.store.set_prompt_from(self.session.id, first, summary)

    def _begin_anew(self, *, with_last: bool) -> None:
        if with_last:
            self._ready_to_ask()
        last, old = self.last("user"), self.session
        self.session = self.store.create(model=old.model, system=old.system, sampling=old.sampling)
        self.question = None
        self._left_out.clear()
        self.reload(None)
        if with_last:
            self._add_and_ask(None, last.content, last.attachments)

    def _summarise(self, question: ContextQuestion) -> None:
        self._ready_to_ask()
        leaf = self.message(question.leaf)
        turn = Turn(self.store, leaf, continuing=question.during_answer, summarising=True, dropping=True)
        longest = summary_tokens(self.context_limit)
        messages = summary_messages(self.session, self.messages, longest)
        self.engine.submit(Generate(turn.id, messages, max_tokens=longest, thinking=False, drop_oldest=True))
        self._turn, self.phase = turn, "summarising"

    def _summarised(self, turn: Turn, *, cancelled: bool) -> None:
        self._turn, self.phase = None, "idle"
        summary = split_thinking(turn.summary).answer.strip()
        if not cancelled and not summary:
            self.notice = "the model gave no summary"
        elif not cancelled:
            self._leave_out(self.last("user").id, summary)
            self._ask(turn.leaf.id, continuing=turn.continuing)

    # --- common ground ---------------------------------------------------------------------------------------

    def _add_and_ask(self, parent: int | None, content: str, attachments: tuple[Attachment, ...]) -> Message:
        message = self.store.add(self.session.id, parent, "user", content, attachments=attachments)
        self.reload(message.id)
        self._ask(message.id)
        return message

    def _ask(
        self,
        leaf_id: int,
        *,
        continuing: bool = False,
        drop_oldest: bool = False,
        sampling: dict[str, Any] | None = None,
    ) -> None:
        """Submit the branch up to this message; with `continuing` it is the answer so far.

        sampling: in place of the session's.
        """
        self._ready_to_ask()
        leaf = self.message(leaf_id)
        branch = self.messages[: self.messages.index(leaf) + 1]
        turn = Turn(
            self.store,
            leaf,
            model=self._speaker,
            system=self.session.system,
            continuing=continuing,
            dropping=drop_oldest,
        )
        turn.sampling = self.session.sampling if sampling is None else sampling
        self.engine.submit(
            answer_request(
                turn.id, self.session, branch, sampling=sampling, continuing=continuing, drop_oldest=drop_oldest
            )
        )
        self.messages = branch
        self._turn, self.phase, self.question, self.notice = turn, "waiting", None, None
        self.draft.sent()

    @property
    def _speaker(self) -> str | None:
        """Who answers, as far as known while the model loads."""
        return self.engine.card.name if self.engine.card else self.session.model

    def _ready_to_ask(self) -> None:
        self._idle()
        if self.engine.state == "stopped":  # asked before the screen came to start it
            self.load_model()
        if self.engine.state not in ("loading", "ready"):
            raise EngineError("the engine is not running", "restart it, or choose another model")

    def _changing_branch(self) -> None:
        self._idle()
        self.question = None

    def _idle(self) -> None:
        if self._turn is not None:
            raise EngineError("an answer is being written", "stop it first")
        self.settle()


def _one_line(failure: Failed | Damaged) -> str:
    return f"{failure.message} ({failure.hint})" if failure.hint else failure.message
