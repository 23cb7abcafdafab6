"""A chat without a screen: one session, one engine, and everything a person can do with them.

The UI calls the methods below, calls `poll` 10-15 times a second and draws what the attributes say. Every message is
in the store before the engine hears of it, and an answer grows in the store as it grows on the screen. Actions
raise HeadraceError with nothing changed; what goes wrong later ends up in `notice`.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from app.attachments import take_attachments
from app.conversation_prompt import SUMMARY_TOKENS, first_sent, prompt_messages, summary_messages
from app.engine_client import ChatEngine
from app.engine_messages import (
    ContextFull,
    Delta,
    Died,
    Done,
    Dropped,
    Event,
    Failed,
    Generate,
    ModelSpec,
    Prefill,
)
from app.sessions.records import Message, Session, TurnFigures
from app.sessions.store import SessionStore
from app.thinking import split_thinking
from runtime.errors import EngineError, UsageError

Phase = Literal["idle", "waiting", "prefill", "answering", "summarising"]
ContextChoice = Literal["drop", "summarise", "new"]
_ids = itertools.count(1)  # of generations, over all conversations: a late event never meets another's answer


@dataclass(frozen=True, slots=True)
class ContextQuestion:
    """The context is full: the user has to choose what goes.

    tokens: what the prompt would have, or what prompt and answer have grown to. during_answer: the answer ran into
    the limit and is kept as partial; after `drop` or `summarise` it is continued.
    """

    tokens: int
    limit: int
    during_answer: bool


@dataclass(frozen=True, slots=True)
class Branches:
    """The alternatives at one message: their ids, oldest first, and which one is shown."""

    ids: tuple[int, ...]
    shown: int  # index into ids


@dataclass(slots=True)
class _Turn:
    """A submitted generation. message_id: the answer it writes, None before its first text."""

    id: int
    message_id: int | None = None
    text: str = ""  # of a summary, which is no message
    unsaved: str = ""
    continuing: bool = False
    summarising: bool = False


class Conversation:
    """One session being talked to.

    messages: the active branch, first to last, the growing answer included. context_tokens: of prompt and answer, as
    last known. question: set while the user has to choose, see `resolve`. notice: one line the user should see.
    """

    def __init__(
        self, engine: ChatEngine, store: SessionStore, session: Session | None = None, *, context: int | None = None
    ) -> None:
        """`session` None begins a new one. `context`: the limit to load models with, None for what memory allows."""
        self.engine = engine
        self.store = store
        self.session = session if session is not None else store.create()
        self.phase: Phase = "idle"
        self.question: ContextQuestion | None = None
        self.notice: str | None = None
        self._context = context
        self._turn: _Turn | None = None
        store.recover(self.session.id)
        self._reload()

    # --- what the screen shows -------------------------------------------------------------------------------

    @property
    def context_limit(self) -> int | None:
        """Tokens; None until a model is loaded."""
        return self.engine.card.context_limit if self.engine.card else None

    @property
    def not_sent(self) -> int:
        """How many messages at the start of the active branch the model no longer sees."""
        return first_sent(self.session, self.messages)

    @property
    def choices(self) -> tuple[ContextChoice, ...]:
        """What `resolve` takes now."""
        return ("drop", "summarise", "new") if self.question else ()

    def branches(self, message_id: int) -> Branches:
        """The alternatives at a message of the active branch."""
        ids = self.store.alternatives(self._message(message_id))
        return Branches(tuple(ids), ids.index(message_id))

    # --- what a person does ----------------------------------------------------------------------------------

    def send(self, text: str) -> Message:
        """Say something; `/file` lines and `@path` mentions become attachments. Raises UsageError, EngineError."""
        self._ready_to_ask()
        content, attachments = take_attachments(text)
        if not content.strip() and not attachments:
            raise UsageError("there is nothing to send")
        parent = self.messages[-1].id if self.messages else None
        message = self.store.add(self.session.id, parent, "user", content, attachments=attachments)
        self._reload()
        self._ask()
        return message

    def stop(self) -> None:
        """End the answer; what was said is kept as partial."""
        self.engine.cancel()

    def regenerate(self, message_id: int | None = None) -> None:
        """Another answer in the place of this one (None: the last), as a new branch."""
        self._ready_to_ask()
        answer = self._last_answer() if message_id is None else self._message(message_id)
        if answer.role != "assistant" or answer.parent_id is None:
            raise UsageError("only an answer can be generated again")
        self.messages = self._up_to(answer.parent_id)
        self._ask()

    def edit(self, message_id: int, text: str) -> None:
        """A new branch with another text: a user message is answered at once, an answer can be continued."""
        self._ready_to_ask()
        old = self._message(message_id)
        if old.role == "user":
            content, attachments = take_attachments(text)
            if not content.strip() and not attachments:
                raise UsageError("there is nothing to send")
            kept = attachments or old.attachments
            self.store.add(self.session.id, old.parent_id, "user", content, attachments=kept)
            self._reload()
            self._ask()
        else:
            self.store.add(self.session.id, old.parent_id, "assistant", text, model=old.model)
            self._reload()

    def continue_answer(self) -> None:
        """Go on where the last answer ended; a last message without an answer is answered."""
        self._ready_to_ask()
        if not self.messages:
            raise UsageError("there is nothing to continue")
        self._ask(continuing=self.messages[-1].role == "assistant")

    def switch_branch(self, message_id: int, step: int) -> None:
        """Show the next (1) or previous (-1) alternative at this message; at the end nothing happens."""
        self._idle()
        branches = self.branches(message_id)
        wanted = min(max(branches.shown + step, 0), len(branches.ids) - 1)
        self.session = self.store.activate(self.store.message(branches.ids[wanted]))
        self.question = None
        self._reload()

    def load_model(self) -> None:
        """Start the engine with the session's model."""
        self.engine.start(ModelSpec(self.session.model, self._context))

    def set_model(self, name: str | None) -> None:
        """Go on with another model, from this session's next answer on."""
        self.session = self.store.set_model(self.session.id, name)
        self.load_model()

    def set_system(self, text: str) -> None:
        """The system prompt of this session, from the next answer on."""
        self.session = self.store.set_system(self.session.id, text)

    def set_sampling(self, values: Mapping[str, Any]) -> None:
        """Change sampling settings (SamplingParams fields, max_tokens, stop) of this session; None takes one back."""
        merged = {key: value for key, value in {**self.session.sampling, **values}.items() if value is not None}
        self.session = self.store.set_sampling(self.session.id, merged)

    def resolve(self, choice: ContextChoice) -> None:
        """Answer `question`: drop the oldest turns, put a summary in their place, or go on in a new session."""
        self._idle()
        if (question := self.question) is None:
            raise UsageError("the context is not full")
        if choice == "new":
            self._begin_anew(with_last=not question.during_answer)
        elif choice == "drop":
            self._ask(continuing=question.during_answer, drop_oldest=True)
        else:
            self._summarise(continuing=question.during_answer)

    def close(self) -> None:
        """Leave: an answer being written is kept as partial, a session nothing was said in goes away."""
        if self._turn is not None:
            self.engine.cancel()
            self._end_turn("cancelled", partial=True)
        if not self.messages and not self.store.messages(self.session.id):
            self.store.delete(self.session.id)

    # --- what the engine says --------------------------------------------------------------------------------

    def poll(self) -> list[Event]:
        """Take in what happened since the last call; the events are also returned, in order, for figures and panels."""
        events = self.engine.poll()
        for event in events:
            self._take(event)
        self._save()
        return events

    def _take(self, event: Event) -> None:
        turn = self._turn
        if isinstance(event, Died):
            self.notice = event.message
            if turn is not None:
                self._end_turn("died", partial=True)
        elif turn is None or getattr(event, "id", None) != turn.id:
            if isinstance(event, Failed) and event.id is None:
                self._say(event)
        elif isinstance(event, Prefill):
            self.context_tokens = event.reused + event.total + 1
            if not turn.summarising:
                self.phase = "prefill"
        elif isinstance(event, Delta):
            self._grow(turn, event)
        elif isinstance(event, Dropped):
            if not turn.summarising:
                self._dropped(event.messages)
        elif isinstance(event, Done):
            self._done(turn, event)
        elif isinstance(event, ContextFull):
            self._context_full(event, turn)
        elif isinstance(event, Failed):
            self._say(event)
            self._end_turn("failed", partial=True)

    def _say(self, failure: Failed) -> None:
        self.notice = f"{failure.message} ({failure.hint})" if failure.hint else failure.message

    def _grow(self, turn: _Turn, delta: Delta) -> None:
        self.context_tokens += len(delta.records)
        if turn.summarising:
            turn.text += delta.text
            return
        self.phase = "answering"
        if delta.text:
            if turn.message_id is None:
                self._begin_answer(turn)
            turn.unsaved += delta.text
            self.messages[-1] = replace(self.messages[-1], content=self.messages[-1].content + delta.text)

    def _begin_answer(self, turn: _Turn) -> None:
        model = self.engine.card.name if self.engine.card else self.session.model
        answer = self.store.begin_answer(self.session.id, self.messages[-1].id, model)
        turn.message_id = answer.id
        self.messages.append(answer)

    def _save(self) -> None:
        turn = self._turn
        if turn is not None and turn.unsaved and turn.message_id is not None:
            self.store.grow(turn.message_id, turn.unsaved)
            turn.unsaved = ""

    def _done(self, turn: _Turn, done: Done) -> None:
        self.context_tokens = done.summary.prompt_tokens + done.summary.completion_tokens
        if turn.summarising:
            self._summarised(turn, done)
            return
        if turn.message_id is None and done.reason != "cancelled":
            self._begin_answer(turn)  # an empty answer is an answer
        self._end_turn(done.reason, _figures(done), partial=done.reason != "stop")
        if done.context_full:
            self._ask_about_context(self.context_tokens, during_answer=True)

    def _end_turn(self, reason: str, figures: TurnFigures | None = None, *, partial: bool) -> None:
        self._save()
        turn, self._turn = self._turn, None
        self.phase = "idle"
        if turn is not None and turn.message_id is not None:
            self.store.finish(turn.message_id, reason, figures, partial=partial)
        tokens = self.context_tokens
        self._reload()
        self.context_tokens = tokens

    # --- the full context ------------------------------------------------------------------------------------

    def _context_full(self, event: ContextFull, turn: _Turn) -> None:
        self._end_turn("length", partial=True)
        self._ask_about_context(event.prompt_tokens, during_answer=turn.continuing)

    def _ask_about_context(self, tokens: int, *, during_answer: bool) -> None:
        limit = self.context_limit or tokens
        turns = sum(message.role == "user" for message in self.messages[self.not_sent :])
        if turns > 1:
            self.question = ContextQuestion(tokens, limit, during_answer)
        else:
            self.notice = f"the context is full: {tokens} tokens, the limit is {limit}; nothing older is left to drop"

    def _dropped(self, count: int) -> None:
        first = self.messages[min(self.not_sent + count, len(self.messages) - 1)]
        self.session = self.store.set_prompt_from(self.session.id, first.id, self.session.summary)

    def _begin_anew(self, *, with_last: bool) -> None:
        last = next((message for message in reversed(self.messages) if message.role == "user"), None)
        old = self.session
        self.session = self.store.create(model=old.model, system=old.system, sampling=old.sampling)
        self.question = None
        if with_last and last is not None:
            self.store.add(self.session.id, None, "user", last.content, attachments=last.attachments)
        self._reload()
        if self.messages:
            self._ask()

    def _summarise(self, *, continuing: bool) -> None:
        self._ready_to_ask()
        turn = _Turn(next(_ids), continuing=continuing, summarising=True)
        messages = summary_messages(self.session, self.messages)
        self.engine.submit(Generate(turn.id, messages, max_tokens=SUMMARY_TOKENS, drop_oldest=True))
        self._turn, self.phase = turn, "summarising"

    def _summarised(self, turn: _Turn, done: Done) -> None:
        self._turn, self.phase = None, "idle"
        summary = split_thinking(turn.text).answer.strip()
        if done.reason == "cancelled":
            return
        if not summary:
            self.notice = "the model gave no summary"
            return
        last = max(i for i, message in enumerate(self.messages) if message.role == "user")
        self.session = self.store.set_prompt_from(self.session.id, self.messages[last].id, summary)
        self._ask(continuing=turn.continuing)

    # --- common ground ---------------------------------------------------------------------------------------

    def _ask(self, *, continuing: bool = False, drop_oldest: bool = False) -> None:
        """Submit the active branch; with `continuing` its last message is the answer so far."""
        turn = _Turn(next(_ids), continuing=continuing)
        last = self.messages[-1]
        sampling = dict(self.session.sampling)
        self.engine.submit(
            Generate(
                id=turn.id,
                messages=prompt_messages(self.session, self.messages[:-1] if continuing else self.messages),
                max_tokens=sampling.pop("max_tokens", None),
                stop=tuple(sampling.pop("stop", ())),
                sampling=sampling,
                continue_text=last.content if continuing else "",
                drop_oldest=drop_oldest,
            )
        )
        if continuing:
            turn.message_id = last.id
            self.store.reopen(last.id)
        self._turn, self.phase, self.question, self.notice = turn, "waiting", None, None

    def _ready_to_ask(self) -> None:
        self._idle()
        if self.engine.state not in ("loading", "ready"):
            raise EngineError("the engine is not running", "restart it, or choose another model")

    def _idle(self) -> None:
        if self._turn is not None:
            raise EngineError("an answer is being written", "stop it first")

    def _reload(self) -> None:
        """The active branch and the session as they are in the store."""
        self.session = self.store.session(self.session.id)
        self.messages = self.store.branch(self.session.id)
        figures = next((m.figures for m in reversed(self.messages) if m.figures), None)
        self.context_tokens = figures.prompt_tokens + figures.completion_tokens if figures else 0

    def _message(self, message_id: int) -> Message:
        for message in self.messages:
            if message.id == message_id:
                return message
        raise UsageError(f"message {message_id} is not on this branch")

    def _last_answer(self) -> Message:
        for message in reversed(self.messages):
            if message.role == "assistant":
                return message
        raise UsageError("there is no answer yet")

    def _up_to(self, message_id: int) -> list[Message]:
        at = self.messages.index(self._message(message_id))
        return self.messages[: at + 1]


def _figures(done: Done) -> TurnFigures:
    summary = done.summary
    return TurnFigures(
        prompt_tokens=summary.prompt_tokens,
        reused_tokens=summary.reused_tokens,
        completion_tokens=summary.completion_tokens,
        ttft_s=done.ttft_s,
        prefill_tokens_per_second=summary.prefill_tokens_per_second,
        decode_tokens_per_second=summary.decode_tokens_per_second,
        achieved_gb_s=summary.achieved_gb_s,
        mbu=done.mbu,
        kv_cache_bytes=summary.kv_cache_bytes,
    )
