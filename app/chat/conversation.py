"""A chat without a screen: one session, one engine, and everything a person can do with them.

The UI calls the methods below, and those of what it builds on (`leaving_out`, `answered_session`, `open_session`),
calls `poll` up to ten times a second and draws what the attributes say. Actions raise HeadraceError with nothing
changed; what goes wrong later ends up in `notice`.
"""

import time
from collections.abc import Callable
from typing import Any, ParamSpec

from headrace.app.answer.sampling_options import CHAT_SAMPLING
from headrace.app.chat.attachments import parse_message
from headrace.app.chat.context_question import context_full_notice
from headrace.app.chat.leaving_out import LeavingOut
from headrace.app.chat.open_session import tokens_held
from headrace.app.chat.turn import Turn
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
    Prefill,
    PrefixCached,
    Ready,
    one_line,
)
from headrace.app.sessions.records import Message, Session
from headrace.app.sessions.store import SessionStore
from headrace.runtime.errors import EngineError, SessionError, UsageError

P = ParamSpec("P")
WARMER = f"temperature 0 would repeat the answer: sampled at {CHAT_SAMPLING['temperature']}"


class Conversation(LeavingOut):
    """One session being talked to."""

    def __init__(
        self,
        engine: ChatEngine,
        store: SessionStore,
        session: Session | None = None,
        *,
        context: int | None = None,
        kv: str = "f16",
    ) -> None:
        """`session` None begins a new one. `context`, `kv`: how to load models, see `ModelSpec`."""
        super().__init__(engine, store, session if session is not None else store.create(), context, kv)
        self._unasked: int | None = None  # the question that no model could be loaded for: asked once there is one

    # --- what a person does ----------------------------------------------------------------------------------

    def send(self, text: str) -> Message:
        """Say something; `/file` lines and `@path` mentions become attachments. Raises UsageError, EngineError."""
        self._ready_to_ask()
        content, attachments = parse_message(text)
        draft = self.draft.count_of(text)
        if draft is not None and (least := draft.tokens if self._alone else draft.message) > draft.longest:
            raise UsageError(context_full_notice(least, self.context_limit or draft.longest, "shorten the message"))
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

    def regenerate(self, message_id: int | None = None) -> None:
        """Another answer in the place of this one, or to this question, as a new branch. None: the last message.

        It is sampled anew: with the seed after the last one where the session has a seed, and at the chat's own
        temperature where the session's is 0, which `notice` says.
        """
        question, answered = self._question_of(message_id)
        self._ask(question, sampling=self._sampled_anew(question) if answered else None)
        if answered and self.repeats:
            self.notice = WARMER

    def asked_anew(self, count: int) -> tuple[int, list[dict[str, Any]]]:
        """What `count` answers like that of `regenerate` would be to: the id of the last question, and with which
        settings each is sampled. Raises UsageError, EngineError."""
        question, _ = self._question_of(None)
        return question, [self._sampled_anew(question, later) for later in range(count)]

    def _question_of(self, message_id: int | None) -> tuple[int, bool]:
        """The id of the question that this message asks or answers, and whether the branch has an answer to it."""
        self._ready_to_ask()
        if not self.messages:
            raise UsageError("nothing was asked yet")
        again = self.messages[-1] if message_id is None else self.message(message_id)
        question = again.id if again.role == "user" else again.parent_id
        if question is None:
            raise UsageError("no question stands before this answer")
        return question, any(message.parent_id == question for message in self.messages)

    @property
    def repeats(self) -> bool:
        """Whether the session's own settings would give the same answer every time."""
        return not self.effective.get("temperature")

    def _sampled_anew(self, question: int, later: int = 0) -> dict[str, Any]:
        """The session's settings for one more answer to this question, after `later` others."""
        sampling = dict(self.session.sampling)
        if self.repeats:
            sampling |= CHAT_SAMPLING
        if (seed := sampling.get("seed")) is not None:
            answer = next((message for message in self.messages if message.parent_id == question), None)
            there = len(self.store.alternatives(answer)) if answer is not None else 0
            sampling["seed"] = (seed + there + later) % 2**64
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

    def set_model(self, name: str) -> None:
        """Go on with another model, from this session's next answer on. Raises what `check_model_name` does."""
        from headrace.app.chat.model_names import check_model_name  # the catalog's reader is no part of the start

        check_model_name(name)
        self.session = self.store.set_model(self.session.id, name)
        self.load_model()

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

    def _or_notice(self, action: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """A store that fails (a full disk) is said so and tried again; the chat goes on without it, as it does where an
        engine that was to be asked has died meanwhile."""
        try:
            action(*args, **kwargs)
        except (SessionError, EngineError) as error:
            self.notice = one_line(str(error), error.hint)

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
                self.notice = one_line(event.message, event.hint)
            case Ready():
                unasked, self._unasked = self._unasked, None
                if unasked is not None and unasked == self.leaf and self.messages[-1].role == "user":
                    self._ask(unasked)
            case Damaged():
                self.damage = self.notice = one_line(event.message, event.hint)
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
                self._no_room(turn, event)
            case Failed() if self.engine.state == "failed":  # for want of a model: why, was said when that failed
                self._end_turn(turn, "failed")
                self._unasked = self.leaf
            case Failed():
                self._end_turn(turn, "failed")
                self.notice = one_line(event.message, event.hint)
            case Abandoned():
                self._end_turn(turn, "cancelled")
            case Done():
                self._done(turn, event)
                self.notice = self.notice or self.damage

    def _done(self, turn: Turn, done: Done) -> None:
        tokens = tokens_held(done.summary.prompt_tokens, done.summary.completion_tokens, done.reason)
        if turn.summarising:
            self._summarised(turn, cancelled=done.reason == "cancelled")
            return
        self._end_turn(turn, done.reason, done)
        self.context_tokens = tokens
        if done.context_full and turn.answer is not None:
            self._ask_what_goes(tokens, turn.answer, during_answer=True)
