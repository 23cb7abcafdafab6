"""`/again N`: several new answers to the last question, generated in one batch, of which the user takes one.

Each is sampled like `Conversation.regenerate` does, on a branch of its own. The screen of `/again` draws `answers` and
calls `poll`; `parallel_answers.py` has the parts that `/compare` shares.

Guard: tests/app/chat/test_candidates.py.
"""

from headrace.app.chat.answer_setup import WARMER, AnswerSetup
from headrace.app.chat.conversation import Conversation
from headrace.app.chat.parallel_answers import ParallelAnswer, ParallelAnswers
from headrace.app.sessions.records import Message
from headrace.runtime.errors import UsageError

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
        question, samplings = conversation.resamplings(count)  # starts an engine that is not there
        super().__init__(conversation, max_running=count)
        session = conversation.session
        self.answers = tuple(
            ParallelAnswer(str(number), AnswerSetup(session.model, session.system, sampling), conversation)
            for number, sampling in enumerate(samplings, 1)
        )
        self._share_main()
        for answer in self.answers:
            answer.branch.reload(question)
        self.question: Message = self.answers[0].messages[-1]
        self.first = len(self.answers[0].messages)
        self._ask(self.answers)
        if self.notice is None and conversation.greedy:
            self.notice = WARMER

    @property
    def growing(self) -> int:
        """Number of candidates that have not ended."""
        return len(self._running)

    def take(self, answer: ParallelAnswer | None) -> None:
        """Continue with this candidate. Raises UsageError for one that is not complete, or empty."""
        if answer is not None and answer.phase != "idle":
            raise UsageError(f"{answer.name} is still being written", "Esc stops all")
        if answer is not None and answer.answer is None:
            raise UsageError(f"{answer.name} has said nothing")
        self.close()
        self._activate(answer)

    def _submit(self, answer: ParallelAnswer) -> None:
        super()._submit(answer)
        if answer.turn is not None:
            self.ids = (*self.ids, answer.turn.id)
