"""`/again N`: several new answers to the last question, generated in one batch, of which the user takes one.

Each is sampled like `Conversation.regenerate` does, on a branch of its own. The screen of `/again` draws `answers` and
calls `poll`; `parallel_answers.py` has the parts that `/compare` shares.
"""

from headrace.app.chat.answer_setup import WARMER, AnswerSetup
from headrace.app.chat.conversation import Conversation
from headrace.app.chat.parallel_answers import ParallelAnswer, ParallelAnswers, ParallelEvent, ParallelPhase
from headrace.app.engine.events import Damaged, Died, Event, Failed, Ready, one_line
from headrace.app.sessions.records import Message
from headrace.runtime.errors import HeadraceError, UsageError

MIN_CANDIDATES = 2
MAX_CANDIDATES = 8
"""The help of `/again` in `commands.py` has both bounds in words."""


class Candidates(ParallelAnswers):
    """Several answers to one question, of which one may be taken.

    answers: the candidates, named 1, 2, ...
    question: their question.
    first: the number of messages before them.
    """

    def __init__(self, conversation: Conversation, count: int) -> None:
        """Submit all requests. Raises UsageError, EngineError, SessionError."""
        if not MIN_CANDIDATES <= count <= MAX_CANDIDATES:
            bounds = f"{MIN_CANDIDATES} to {MAX_CANDIDATES}"
            raise UsageError(f"/again takes a number from {bounds}, not {count}", "as in /again 4")
        super().__init__(conversation)
        question, samplings = conversation.resamplings(count)
        self.notice = WARMER if conversation.greedy else None
        session = conversation.session
        self.answers = tuple(
            ParallelAnswer(str(number), AnswerSetup(session.model, session.system, sampling), self._store, session)
            for number, sampling in enumerate(samplings, 1)
        )
        for answer in self.answers:
            answer.show(question)
            answer.phase = "loading"  # also of a loaded model, until `_submit`
        self.question: Message = self.answers[0].messages[-1]
        self.first = len(self.answers[0].messages)
        if conversation.engine.state == "ready":
            self._submit()

    @property
    def growing(self) -> int:
        """Number of candidates that have not ended."""
        return sum(answer.phase != "idle" for answer in self.answers)

    @property
    def phase(self) -> ParallelPhase:
        phases = {answer.phase for answer in self.answers}
        if "answering" in phases:
            return "answering"
        if "prefill" in phases:
            return "prefill"
        if phases == {"idle"}:
            return "idle"
        return "waiting"

    def stop(self) -> None:
        """Cancel all; their text is kept as partial."""
        self._conversation.engine.cancel()
        for answer in self.answers:
            if answer.phase == "loading":
                answer.phase = "idle"

    def take(self, answer: ParallelAnswer | None) -> None:
        """Continue with this candidate. Raises UsageError for one that is not complete, or empty."""
        if answer is not None and answer.phase != "idle":
            raise UsageError(f"{answer.name} is still being written", "Esc stops all")
        if answer is not None and answer.answer is None:
            raise UsageError(f"{answer.name} has said nothing")
        self.close()
        self._activate(answer.leaf if answer is not None else self._before)

    def close(self) -> None:
        growing = [answer for answer in self.answers if answer.phase != "idle"]
        if growing:
            self._conversation.engine.cancel()
        for answer in growing:
            answer.end("cancelled")
        self._settle()

    def poll(self) -> list[ParallelEvent]:
        events: list[ParallelEvent] = []
        for event in self._conversation.engine.poll():
            about = getattr(event, "id", None)
            answer = next((each for each in self.answers if each.turn is not None and each.turn.id == about), None)
            events.append((answer, event))
            with self._failure_noticed():
                self._handle(answer, event)
        self._save()
        return events

    def _handle(self, answer: ParallelAnswer | None, event: Event) -> None:
        if answer is not None:
            if answer.phase != "idle":
                self._handle_own(answer, event)
        elif isinstance(event, Ready):
            self._submit()
        elif isinstance(event, Damaged):
            self.notice = one_line(event.message, event.hint)
        elif isinstance(event, Died) or (isinstance(event, Failed) and event.id is None):
            self.notice = one_line(event.message, event.hint) if isinstance(event, Failed) else event.message
            for each in self.answers:
                if each.phase != "idle":
                    each.notice = event.message
                    with self._failure_noticed():
                        self._end(each, "died" if isinstance(event, Died) else "failed")

    def _submit(self) -> None:
        """Submit the requests that wait for the model."""
        engine = self._conversation.engine
        assert engine.card is not None
        for answer in self.answers:
            if answer.phase == "loading":
                try:
                    engine.submit(answer.begin(engine.card))
                except HeadraceError as error:
                    answer.notice = str(error)
                    with self._failure_noticed():
                        self._end(answer, "failed")
        self.ids = tuple(answer.turn.id for answer in self.answers if answer.turn is not None)
