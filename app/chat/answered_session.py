"""A session that an engine answers: one answer at a time, stored as it grows.

A message is in the store before the engine hears of it; how an answer gets there is `turn`'s business.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal

from headrace.app.chat.answer_setup import answer_request, settings_used
from headrace.app.chat.context_question import ContextQuestion
from headrace.app.chat.draft import Draft
from headrace.app.chat.open_session import OpenSession
from headrace.app.chat.turn import RETRY_S, Turn
from headrace.app.engine.client import ChatEngine
from headrace.app.engine.messages import Delta, Done, ModelSpec
from headrace.app.sessions.records import Attachment, Message, Session
from headrace.app.sessions.store import SessionStore
from headrace.runtime.errors import DeletedError, EngineError

Phase = Literal["idle", "waiting", "prefill", "answering", "summarising"]


class AnsweredSession(OpenSession):
    """messages: the active branch, first to last, the growing answer included. context_tokens: of prompt and answer, as
    last known. draft: what is being typed, as it would be sent. notice: one line the user should see. question: set
    while the user has to choose what no longer is sent.
    """

    def __init__(self, engine: ChatEngine, store: SessionStore, session: Session, context: int | None, kv: str) -> None:
        super().__init__(store, session)
        self.engine = engine
        self.phase: Phase = "idle"
        self.notice: str | None = None
        self.damage: str | None = None  # of the model's files: said again with every answer
        self.question: ContextQuestion | None = None
        self.draft = Draft()
        self.guessed: dict[int, Sequence[tuple[int, int]]] = {}
        """By answer, as far as they were said since the chat began: where in it is what had been guessed."""
        self._context = context
        self._kv = kv
        self._turn: Turn | None = None
        self._unstored: tuple[Turn, str, Done | None] | None = None  # an answer that ended, until the store has it
        self._try_again = 0.0

    @property
    def context_limit(self) -> int | None:
        """Tokens; None until a model is loaded."""
        return self.engine.card.context_limit if self.engine.card else None

    @property
    def effective(self) -> dict[str, Any]:
        """The sampling settings in effect: the session's, the model's as far as it is loaded, the chat's own."""
        return settings_used(self.session.sampling, self.engine.card)

    def load_model(self) -> None:
        """Start the engine with the session's model. An answer being written is kept as partial."""
        self.notice = self.damage = None
        self.engine.start(ModelSpec(self.session.model, self._context, self._kv))

    def stop(self) -> None:
        """End the answer; what was said is kept as partial."""
        self.engine.cancel()

    def settle(self) -> None:
        """Store the last answer, if that failed when it ended. Raises SessionError as long as it fails."""
        if self._unstored is not None:
            self._store_answer(*self._unstored)
            self.notice = None

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

    def _grow(self, turn: Turn, delta: Delta) -> None:
        grown = self.context_tokens + sum(record.tokens for record in delta.records)
        self.context_tokens = grown if self.context_limit is None else min(grown, self.context_limit)
        if not turn.summarising:
            self.phase = "answering"
        if turn.answer is None and turn.sampling is not None:
            turn.sampling = settings_used(turn.sampling, self.engine.card)
        if delta.text:
            turn.grow(delta.text, self._speaker, delta.guessed)
            if turn.answer is not None and turn.guessed:
                self.guessed[turn.answer.id] = turn.guessed
            self._show(turn)

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
        try:
            turn.end(reason, done)
        except DeletedError:  # in another process: said once, and not tried again
            self._unstored = None
            with suppress(DeletedError):  # it may have been all of the session
                self.reload(self.store.session(self.session.id).active_leaf)
            raise
        self._unstored = None
        tokens = self.context_tokens
        self.reload(self.leaf if turn.answer is None else turn.answer.id)
        self.context_tokens = tokens

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

    def _idle(self) -> None:
        if self._turn is not None:
            raise EngineError("an answer is being written", "stop it first")
        self.settle()

    def _changing_branch(self) -> None:
        self._idle()
        self.question = None
