"""The answers of one branch, one at a time: submitted to the engine, and stored as they are generated.

`Conversation` has one writer, `/compare` and `/again` have one for each of their answers (`parallel_answers.py`). They
decide when to ask, and this module what is stored. A message is in the store before its request is submitted. An
answer that cannot be stored is kept, and `settle` tries again.

Guards: tests/app/chat/test_conversation.py; test_comparison.py for answers beside each other.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Literal

from msgspec.structs import replace

from headrace.app.answer.answer_steps import AnswerSteps
from headrace.app.chat.answer_setup import answer_request, settings_used
from headrace.app.chat.session_branch import SessionBranch, tokens_held
from headrace.app.chat.turn import Turn
from headrace.app.engine.client import ChatEngine
from headrace.app.engine.commands import Generate
from headrace.app.engine.events import Delta, Event
from headrace.app.sessions.records import Message, Session
from headrace.runtime.errors import DeletedError, EngineError

AnswerPhase = Literal["idle", "queued", "loading", "waiting", "prefill", "answering", "summarising"]
"""`queued`, and `loading` of its model, are phases of parallel answers alone."""


class AnswerWriter:
    """Writes the answers of one branch, one after the other.

    branch: its messages, the growing answer included.
    engine: generates the answers.
    turn: the generation, from its request until its answer is stored:

        None                   idle, all is stored        `ask`, `submit`
        without a reason       the answer is written      `handle` of its last event, `end`
        with a reason          it ended, is not stored    `settle`
    """

    def __init__(self, engine: ChatEngine, branch: SessionBranch) -> None:
        self.branch = branch
        self.engine = engine
        self.turn: Turn | None = None
        self._steps: dict[int, AnswerSteps | None] = {}  # by message id

    @property
    def active(self) -> Turn | None:
        """The generation, while its answer is written."""
        if self.turn is None or self.turn.reason is not None:
            return None
        return self.turn

    @property
    def is_unstored(self) -> bool:
        """True if the last answer ended and could not be stored."""
        return self.turn is not None and self.turn.reason is not None

    @property
    def retry_due(self) -> bool:
        """True if it is time to try again to store that answer."""
        return self.turn is not None and self.turn.reason is not None and self.turn.retry_due

    @property
    def phase(self) -> AnswerPhase:
        if self.active is None:
            return "idle"
        if self.active.summarising:
            return "summarising"
        return self.active.phase

    @property
    def repeats(self) -> bool:
        """True if the answer being written has repeated itself for a long time."""
        return self.active is not None and self.active.repeats

    @property
    def session(self) -> Session:
        """The session, with the settings of the next answer."""
        return self.branch.session

    @property
    def model_name(self) -> str | None:
        """The loaded model, or the session's while it is being loaded."""
        return self.engine.card.name if self.engine.card else self.session.model

    def require_inactive(self) -> None:
        if self.active is not None:
            raise EngineError("an answer is being written", "stop it first")

    def ask(
        self,
        leaf_id: int,
        *,
        continuing: bool = False,
        drop_oldest: bool = False,
        sampling: Mapping[str, object] | None = None,
    ) -> None:
        """Submit the branch up to this message, which is the answer so far if `continuing`.

        sampling: replaces the session's.
        """
        branch = self.branch
        session = self.session
        if sampling is not None:
            session = replace(session, sampling=sampling)
        leaf = branch.message(leaf_id)
        messages = branch.messages[: branch.messages.index(leaf) + 1]
        turn = Turn(
            branch.store,
            leaf,
            model=self.model_name,
            system=session.system,
            sampling=session.sampling,
            continuing=continuing,
            dropping=drop_oldest,
        )
        self.submit(turn, answer_request(turn.id, session, messages, continuing=continuing, drop_oldest=drop_oldest))
        branch.messages = messages

    def submit(self, turn: Turn, request: Generate) -> None:
        self.engine.submit(request)
        self.turn = turn

    def handle(self, event: Event) -> None:
        """Add to the answer; `settle` stores one that ended. Raises SessionError if its message cannot be created."""
        turn = self.turn
        assert turn is not None
        branch = self.branch
        card = self.engine.card

        # The answer's message is created with them, at its first text: by then a model that was still loading when the
        # answer was asked for is known, with the settings it recommends.
        if turn.answer is None and turn.sampling is not None:
            turn.model = self.model_name
            turn.sampling = settings_used(turn.sampling, card)
        turn.handle(event)

        # The context in use: counted by the engine at the answer's end, before that as far as it has come.
        metrics = turn.metrics
        if metrics is not None and not turn.summarising:
            branch.context_tokens = tokens_held(metrics.prompt_tokens, metrics.completion_tokens, turn.reason)
        elif turn.phase != "waiting":
            branch.context_tokens = turn.context_tokens
            if card is not None:
                branch.context_tokens = min(turn.context_tokens, card.context_limit)

        if isinstance(event, Delta) and event.text and turn.answer is not None:
            self._steps[turn.answer.id] = turn.steps
            branch.messages = turn.grown(branch.messages)

    def end(self, reason: str) -> None:
        """End the running answer, if there is one; `settle` stores it."""
        if self.active is not None:
            self.active.end(reason)

    def save(self) -> None:
        """Store the text that arrived. Raises SessionError."""
        if self.active is not None:
            self.active.save()

    def steps_of(self, answer: Message) -> AnswerSteps | None:
        """Return the steps of an answer of the branch, the growing one included; None without."""
        if answer.id not in self._steps:
            self._steps[answer.id] = self.branch.store.steps(answer)
        return self._steps[answer.id]

    def settle(self) -> None:
        """Store an answer that ended. Raises SessionError as long as it fails."""
        turn = self.turn
        if turn is None or turn.reason is None:
            return
        branch = self.branch
        try:
            turn.settle()
            leaf = branch.leaf
            if turn.answer is not None:
                leaf = turn.answer.id
                self._steps.pop(leaf, None)  # stored with those of earlier parts
            tokens = branch.context_tokens  # as counted by the engine; `reload` knows only those of stored figures
            branch.reload(leaf)
            branch.context_tokens = tokens
        except DeletedError:  # by another process: not tried again
            self.turn = None
            with suppress(DeletedError):  # the session may be gone, too
                branch.reload(branch.store.session(branch.session.id).active_leaf)
            raise
        self.turn = None
