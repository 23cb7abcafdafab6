"""The same question to two models, or to one model with two setups. Knows no widget.

One answer after the other, always: two models that decode at the same time slow each other, and no figure of either
would be its own. Both are branches of the session, stored as they grow. Where both models fit into memory each keeps
an engine; where they do not, the one engine loads the model whose turn it is.
"""

from collections.abc import Callable, Sequence

from headrace.app.chat.answer_setup import AnswerSetup
from headrace.app.chat.attachments import parse_message
from headrace.app.chat.conversation import Conversation
from headrace.app.chat.room import fits_beside
from headrace.app.chat.side import Side
from headrace.app.chat.side_by_side import Heard, Phase, SideBySide
from headrace.app.engine.client import ChatEngine
from headrace.app.engine.messages import (
    Damaged,
    Died,
    Done,
    Event,
    Failed,
    ModelSpec,
    Ready,
    one_line,
)
from headrace.app.sessions.records import Message
from headrace.runtime.errors import EngineError, HeadraceError, UsageError


class _Seat:
    """An engine, and the model that it was given last."""

    def __init__(self, engine: ChatEngine, model: str | None = None) -> None:
        self.engine, self.model = engine, model


class Comparison(SideBySide):
    """sides: A, which answers as the session does, and B. first: messages that both had before there were two."""

    def __init__(
        self,
        talk: Conversation,
        other: AnswerSetup,
        second: Callable[[], ChatEngine],
        *,
        context: int | None = None,
        kv: str = "f16",
    ) -> None:
        """`second` makes another engine. Raises EngineError while an answer is being written.

        An answer to the last question that A's model gave stays A's; B answers at once.
        """
        super().__init__(talk)
        self._second, self._context, self._kv = second, context, kv
        setups = AnswerSetup.of(talk.session), other
        a, b = (Side(name, setup, talk.store, talk.session) for name, setup in zip("AB", setups, strict=True))
        self.sides = a, b
        up = talk.engine.state in ("loading", "ready")
        self._main = _Seat(talk.engine, setups[0].model_name if up else None)
        self._seats = dict.fromkeys(self.sides, self._main)
        self._queue: list[Side] = []
        self._running: Side | None = None
        self._decided = self.one_model
        self.first = self._begin()

    @property
    def one_model(self) -> bool:
        """Whether both sides are the same model."""
        return self.sides[0].setup.model_name == self.sides[1].setup.model_name

    @property
    def takes_turns(self) -> bool:
        """Whether there are two models and one engine, as far as that was decided."""
        return self._decided and not self.one_model and not self.beside

    @property
    def beside(self) -> bool:
        """Whether each side has an engine to itself."""
        return self._seats[self.sides[1]] is not self._main

    @property
    def running(self) -> Side | None:
        """The side whose turn it is."""
        return self._running

    @property
    def phase(self) -> Phase:
        phase = self._running.phase if self._running is not None else "idle"
        return phase if phase in ("prefill", "answering", "idle") else "waiting"

    # --- what a person does ----------------------------------------------------------------------------------

    def ask(self, text: str) -> None:
        """Ask both sides, each on its own branch. Raises UsageError, EngineError, SessionError."""
        self._idle()
        content, attachments = parse_message(text)
        session = self._talk.session.id
        asked: dict[int | None, int] = {}
        for side in self.sides:
            if side.leaf not in asked:
                asked[side.leaf] = self._store.add(session, side.leaf, "user", content, attachments=attachments).id
            side.show(asked[side.leaf])
        self._ask(self.sides)

    def again(self) -> None:
        """Both answer their last question anew, beside what they said before. Raises UsageError, EngineError."""
        self._idle()
        for side in self.sides:
            if not side.messages:
                raise UsageError("nothing was asked yet")
        for side in self.sides:
            question = next((m for m in reversed(side.messages) if m.role == "user"), None)
            side.show(question.id if question is not None else None)
        self._ask([side for side in self.sides if side.messages])

    def stop(self) -> None:
        """End the answer that is being written; the other side has its turn then."""
        if (side := self._running) is None:
            return
        if side.phase == "loading":
            self._end(side, "cancelled")
        else:
            self._seats[side].engine.cancel()

    def take(self, side: Side | None) -> None:
        """As of any; the conversation goes on with this side's model and settings, too."""
        self.close()
        talk = self._talk
        if side is not None and side.setup != AnswerSetup.of(talk.session):
            talk.store.set_model(talk.session.id, side.setup.model)
            talk.store.set_system(talk.session.id, side.setup.system)
            talk.store.set_sampling(talk.session.id, side.setup.sampling)
        leaf = side.leaf if side is not None else self._before
        self._go_to(leaf)
        up = talk.engine.state in ("loading", "ready")
        if not up or self._main.model != AnswerSetup.of(talk.session).model_name:
            talk.load_model()

    def close(self) -> None:
        self._queue.clear()
        if (side := self._running) is not None:
            self._seats[side].engine.cancel()
            self._end(side, "cancelled")
        self._give_up_second()
        self._settle()

    # --- what the engines say --------------------------------------------------------------------------------

    def poll(self) -> list[Heard]:
        heard: list[Heard] = []
        for seat in list(dict.fromkeys(self._seats.values())):
            for event in seat.engine.poll():
                side = self._running if self._running and self._seats[self._running] is seat else None
                heard.append((side, event))
                self._or_notice(self._take, seat, side, event)
        self._keep()
        return heard

    def _take(self, seat: _Seat, side: Side | None, event: Event) -> None:
        state = seat.engine.state  # an engine that was begun anew may still tell of the one before
        if isinstance(event, Died) and state == "dead":
            seat.model = None
        if isinstance(event, Damaged):
            self.notice = event.message
        if side is None:
            return
        if isinstance(event, Ready):
            if side.phase == "loading" and state == "ready":
                self._submit(side)
        elif isinstance(event, Failed) and event.id is None:
            if state == "failed":
                self._not_loaded(seat, side, event)
        elif isinstance(event, Died) and state == "dead":
            side.notice = event.message
            self._end(side, "died")
        elif side.turn is not None and getattr(event, "id", None) == side.turn.id:
            self._take_own(side, event)

    # --- taking turns ----------------------------------------------------------------------------------------

    def _begin(self) -> int:
        """What the sides begin with, as the conversation stands; how many messages both have had before."""
        a, b = self.sides
        messages = self._talk.messages
        a.show(self._before)
        b.show(self._before)
        if not messages:
            return 0
        a.card = self._talk.engine.card
        if messages[-1].role == "user":
            self._ask(self.sides)
        elif messages[-1].parent_id is None:
            return len(messages)
        else:
            b.show(messages[-1].parent_id)
            if self._by(a, messages[-1]):
                self._ask([b])
            else:
                a.show(messages[-1].parent_id)
                self._ask(self.sides)
        return next(n for n in range(len(messages) - 1, -1, -1) if messages[n].role == "user")

    def _ask(self, sides: Sequence[Side]) -> None:
        self.notice = None
        for side in sides:
            side.phase, side.notice = "queued", None
        self._queue = list(sides)
        self._next()

    def _next(self) -> None:
        """The next side has its turn."""
        if self._running is not None or not self._queue:
            return
        side = self._running = self._queue.pop(0)
        self._give_engine(side)
        seat, wanted = self._seats[side], side.setup.model_name
        if seat.model == wanted and seat.engine.state == "ready":
            self._submit(side)
            return
        side.phase = "loading"
        if seat.model != wanted or seat.engine.state != "loading":
            seat.model = wanted
            seat.engine.start(ModelSpec(side.setup.model, self._context, self._kv))

    def _give_engine(self, side: Side) -> None:
        """Decide, before B's model is loaded for the first time, whether it fits beside A's."""
        if self._decided or side is not self.sides[1]:
            return
        self._decided = True
        card = self._talk.engine.card
        if card is not None and fits_beside(card, side.setup.model):
            self._seats[side] = _Seat(self._second())

    def _submit(self, side: Side) -> None:
        engine = self._seats[side].engine
        assert engine.card is not None
        for other in self._seats.values():
            if other.engine is not engine:
                other.engine.rest()
        try:
            engine.submit(side.begin(engine.card))
        except HeadraceError as error:
            side.notice = str(error)
            self._end(side, "failed")

    def _not_loaded(self, seat: _Seat, side: Side, failure: Failed) -> None:
        seat.model = None
        if seat is not self._main:  # there was less room than it seemed: in the place of A's, then
            self._give_up_second()
            self._running, self._queue = None, [side, *self._queue]
            self._next()
            return
        side.notice = one_line(failure.message, failure.hint)
        self._end(side, "failed")

    def _give_up_second(self) -> None:
        """One engine from now on."""
        for seat in self._seats.values():
            if seat is not self._main:
                seat.engine.close()
        self._seats = dict.fromkeys(self.sides, self._main)

    def _end(self, side: Side, reason: str, done: Done | None = None) -> None:
        self._running = None
        try:
            super()._end(side, reason, done)
        finally:
            self._next()

    @staticmethod
    def _by(side: Side, answer: Message) -> bool:
        """Whether this is what the side would have said: nothing is known of it that is different."""
        names = None, side.setup.model_name, side.card.name if side.card else None
        known = answer.sampling in (None, side.effective) and answer.system in (None, side.setup.system)
        return known and answer.model in names

    def _idle(self) -> None:
        if self._running is not None or self._queue:
            raise EngineError("an answer is being written", "stop it first")
        self._settle()
