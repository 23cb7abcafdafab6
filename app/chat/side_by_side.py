"""Answers on branches of their own, which grow and are stored independently: what comparing and asking again share.

While there is one of these, its `poll` takes the place of the conversation's.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Literal, ParamSpec

from headrace.app.chat.context_question import context_full_notice
from headrace.app.chat.conversation import Conversation
from headrace.app.chat.side import Side
from headrace.app.chat.turn import RETRY_S
from headrace.app.engine.messages import Abandoned, ContextFull, Delta, Done, Event, Failed, Prefill, one_line
from headrace.runtime.errors import DeletedError, EngineError, SessionError

P = ParamSpec("P")
Phase = Literal["idle", "waiting", "prefill", "answering"]
Heard = tuple[Side | None, Event]
"""What an engine said, and the side that it is about."""


class SideBySide:
    """sides: whoever answers, in the order in which they are shown. notice: one line about all of them.

    ids: of the generations that go on at the same time; none where the sides take turns.
    """

    sides: Sequence[Side]
    ids: tuple[int, ...] = ()

    def __init__(self, talk: Conversation) -> None:
        """Raises EngineError while an answer is being written, SessionError where one cannot be stored."""
        if talk.phase != "idle":
            raise EngineError("an answer is being written", "stop it first")
        talk.settle()
        self._talk, self._store = talk, talk.store
        self.notice: str | None = None
        self._before = talk.messages[-1].id if talk.messages else None
        self._unstored: list[tuple[Side, str, Done | None]] = []  # answers that ended, until the store has them
        self._try_again = 0.0

    @property
    def phase(self) -> Phase:
        """What goes on, as far as the one that is furthest along."""
        raise NotImplementedError

    def poll(self) -> list[Heard]:
        """Take in what happened since the last call; the events are also returned, in order."""
        raise NotImplementedError

    def take(self, side: Side | None) -> None:
        """Leave: the conversation goes on with this side's answer; None: as it was before.

        The other sides' answers stay as branches. Raises SessionError where an answer cannot be stored.
        """
        raise NotImplementedError

    def close(self) -> None:
        """End all as it stands; what is being written is kept as partial. Raises SessionError: to be called again."""
        raise NotImplementedError

    def _take_own(self, side: Side, event: Event) -> None:
        """What the engine said of this side's answer."""
        match event:
            case Prefill() | Delta():
                side.take(event)
            case Done():
                self._end(side, event.reason, event)
            case Failed():
                side.notice = one_line(event.message, event.hint)
                self._end(side, "failed")
            case ContextFull():
                hint = "leave out older turns in the chat"
                side.notice = context_full_notice(event.prompt_tokens, event.limit, hint)
                self._end(side, "length")
            case Abandoned():
                self._end(side, "cancelled")

    def _end(self, side: Side, reason: str, done: Done | None = None) -> None:
        """The side's answer is over. Raises SessionError where it could not be stored, yet."""
        side.phase = "idle"
        self._unstored.append((side, reason, done))
        self._settle()

    def _settle(self) -> None:
        """Store the answers that ended. Raises SessionError as long as that fails."""
        self._try_again = time.monotonic() + RETRY_S
        while self._unstored:
            side, reason, done = self._unstored[0]
            try:
                side.end(reason, done)
            except DeletedError as error:  # in another process: not tried again
                side.notice = str(error)
            self._unstored.pop(0)
            self.notice = None if not self._unstored and done is not None else self.notice

    def _keep(self) -> None:
        """Put what came into the store. A store that fails is said so in `notice` and tried again."""
        over = [side for side, _, _ in self._unstored]
        for side in self.sides:
            if side.turn is not None and side not in over:
                self._or_notice(side.turn.save)
        if self._unstored and time.monotonic() >= self._try_again:
            self._or_notice(self._settle)

    def _or_notice(self, action: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            action(*args, **kwargs)
        except SessionError as error:
            self.notice = one_line(str(error), error.hint)

    def _go_to(self, leaf: int | None) -> None:
        """The conversation shows the branch that ends with this message from now on; where another process has deleted
        that, what is left."""
        try:
            if leaf is not None:
                self._store.activate(self._store.message(leaf))
            self._talk.reload(leaf)
        except DeletedError as error:
            self._talk.notice = str(error)
            with suppress(DeletedError):
                self._talk.reload(self._store.session(self._talk.session.id).active_leaf)
