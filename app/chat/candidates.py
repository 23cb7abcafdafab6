"""More answers to the last question, all growing at the same time, of which one is taken. Knows no widget.

Each is sampled anew, as `Conversation.regenerate` does it, and is a branch of its own from its first text on. The
engine answers them side by side: they share what is read of the weights, and what the cache holds of the question.
"""

from collections.abc import Mapping
from typing import Any

from headrace.app.chat.answer_setup import AnswerSetup
from headrace.app.chat.conversation import WARMER, Conversation
from headrace.app.chat.side import Side
from headrace.app.chat.side_by_side import Heard, Phase, SideBySide
from headrace.app.engine.messages import Damaged, Died, Event, Failed, Ready, one_line
from headrace.app.sessions.records import Message
from headrace.runtime.errors import HeadraceError, UsageError

LEAST, MOST = 2, 8
"""How many there may be."""


class Candidates(SideBySide):
    """sides: the candidates, called 1, 2, ... question: what they answer. first: messages that all have before."""

    def __init__(self, talk: Conversation, count: int) -> None:
        """Asks at once. Raises UsageError, EngineError, SessionError."""
        if not LEAST <= count <= MOST:
            raise UsageError(f"/again takes a number from {LEAST} to {MOST}, not {count}", "as in /again 4")
        super().__init__(talk)
        question, samplings = talk.asked_anew(count)
        self.notice = WARMER if talk.repeats else None
        self.sides = tuple(self._side(str(number), one) for number, one in enumerate(samplings, 1))
        for side in self.sides:
            side.show(question)
            side.phase = "loading"
        self.question: Message = self.sides[0].messages[-1]
        self.first = len(self.sides[0].messages)
        if talk.engine.state == "ready":
            self._submit()

    def _side(self, name: str, sampling: Mapping[str, Any]) -> Side:
        session = self._talk.session
        return Side(name, AnswerSetup(session.model, session.system, sampling), self._store, session)

    @property
    def growing(self) -> int:
        """How many are not over."""
        return sum(side.phase != "idle" for side in self.sides)

    @property
    def phase(self) -> Phase:
        phases = {side.phase for side in self.sides}
        if "answering" in phases:
            return "answering"
        return "prefill" if "prefill" in phases else "idle" if phases == {"idle"} else "waiting"

    # --- what a person does ----------------------------------------------------------------------------------

    def stop(self) -> None:
        """End all that grow; what was said is kept as partial."""
        self._talk.engine.cancel()
        for side in self.sides:
            if side.phase == "loading":
                side.phase = "idle"

    def take(self, side: Side | None) -> None:
        """As of any. Raises UsageError for one that is still being written, or has said nothing."""
        if side is not None and side.phase != "idle":
            raise UsageError(f"{side.name} is still being written", "Esc stops all")
        if side is not None and side.answer is None:
            raise UsageError(f"{side.name} has said nothing")
        self.close()
        self._go_to(side.leaf if side is not None else self._before)

    def close(self) -> None:
        growing = [side for side in self.sides if side.phase != "idle"]
        if growing:
            self._talk.engine.cancel()
        for side in growing:
            self._unstored.append((side, "cancelled", None))
            side.phase = "idle"
        self._settle()

    # --- what the engine says --------------------------------------------------------------------------------

    def poll(self) -> list[Heard]:
        heard: list[Heard] = []
        for event in self._talk.engine.poll():
            about = getattr(event, "id", None)
            side = next((one for one in self.sides if one.turn is not None and one.turn.id == about), None)
            heard.append((side, event))
            self._or_notice(self._take, side, event)
        self._keep()
        return heard

    def _take(self, side: Side | None, event: Event) -> None:
        if side is not None:
            if side.phase != "idle":
                self._take_own(side, event)
        elif isinstance(event, Ready):
            self._submit()
        elif isinstance(event, Damaged):
            self.notice = one_line(event.message, event.hint)
        elif isinstance(event, Died) or (isinstance(event, Failed) and event.id is None):
            self.notice = one_line(event.message, event.hint) if isinstance(event, Failed) else event.message
            for one in self.sides:
                if one.phase != "idle":
                    one.notice = event.message
                    self._or_notice(self._end, one, "died" if isinstance(event, Died) else "failed")

    def _submit(self) -> None:
        """Ask for all that wait for the model."""
        engine = self._talk.engine
        assert engine.card is not None
        for side in self.sides:
            if side.phase == "loading":
                try:
                    engine.submit(side.begin(engine.card))
                except HeadraceError as error:
                    side.notice = str(error)
                    self._or_notice(self._end, side, "failed")
        self.ids = tuple(side.turn.id for side in self.sides if side.turn is not None)
