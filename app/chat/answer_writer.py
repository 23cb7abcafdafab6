"""Storage of one answer at a time on a session's branch, as the engine generates it.

`Conversation` has one; it decides when to ask, and this module what is stored. A message is in the store before its
request is submitted. An answer that cannot be stored stays in `unstored`, and `settle` tries again.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Literal

from headrace.app.answer.answer_steps import AnswerSteps
from headrace.app.chat.answer_setup import answer_request, settings_used
from headrace.app.chat.session_branch import SessionBranch
from headrace.app.chat.turn import Turn
from headrace.app.engine.client import ChatEngine
from headrace.app.engine.commands import Generate
from headrace.app.engine.events import Delta, Event
from headrace.app.sessions.records import Message
from headrace.runtime.errors import DeletedError, EngineError

ChatPhase = Literal["idle", "waiting", "prefill", "answering", "summarising"]


class AnswerWriter:
    """Writes the answers of one branch, one after the other.

    turn: the generation that is running.
    unstored: the last one, if it could not be stored when it ended.
    """

    def __init__(self, engine: ChatEngine, branch: SessionBranch) -> None:
        self.turn: Turn | None = None
        self.unstored: Turn | None = None
        self._steps: dict[int, AnswerSteps | None] = {}  # by message id
        self._engine = engine
        self._branch = branch

    @property
    def phase(self) -> ChatPhase:
        if self.turn is None:
            return "idle"
        return "summarising" if self.turn.summarising else self.turn.phase

    @property
    def repeats(self) -> bool:
        """True if the answer being written has repeated itself for a long time."""
        return self.turn is not None and self.turn.repeats

    @property
    def model_name(self) -> str | None:
        """The loaded model, or the session's while it is being loaded."""
        return self._engine.card.name if self._engine.card else self._branch.session.model

    def require_no_turn(self) -> None:
        if self.turn is not None:
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
        branch = self._branch
        leaf = branch.message(leaf_id)
        messages = branch.messages[: branch.messages.index(leaf) + 1]
        turn = Turn(
            branch.store,
            leaf,
            model=self.model_name,
            system=branch.session.system,
            sampling=branch.session.sampling if sampling is None else sampling,
            continuing=continuing,
            dropping=drop_oldest,
        )
        self.submit(
            turn,
            answer_request(
                turn.id, branch.session, messages, sampling=sampling, continuing=continuing, drop_oldest=drop_oldest
            ),
        )
        branch.messages = messages

    def submit(self, turn: Turn, request: Generate) -> None:
        self._engine.submit(request)
        self.turn = turn

    def handle(self, turn: Turn, event: Event) -> None:
        """Add to the answer, or store it at its end. Raises SessionError if its message cannot be created or stored."""
        card = self._engine.card
        # The answer's message is created with them, at its first text: by then a model that was still loading when the
        # answer was asked for is known, with the settings it recommends.
        if turn.answer is None and turn.sampling is not None:
            turn.model = self.model_name
            turn.sampling = settings_used(turn.sampling, card)
        turn.handle(event)
        if turn.reason is not None:
            self._ended(turn)
            return
        if turn.phase != "waiting":
            self._branch.context_tokens = min(turn.context_tokens, card.context_limit) if card else turn.context_tokens
        if isinstance(event, Delta) and event.text and turn.answer is not None:
            self._steps[turn.answer.id] = turn.steps
            self._branch.messages = turn.grown(self._branch.messages)

    def end(self, reason: str) -> None:
        """End the running answer, if there is one, and store it. Raises SessionError if that fails."""
        if (turn := self.turn) is not None:
            turn.end(reason)
            self._ended(turn)

    def _ended(self, turn: Turn) -> None:
        self.turn = None
        self.unstored = turn
        self.settle()

    def save(self) -> None:
        """Store the text that arrived. Raises SessionError."""
        if self.turn is not None:
            self.turn.save()

    def steps_of(self, answer: Message) -> AnswerSteps | None:
        """Return the steps of an answer of the branch, the growing one included; None without."""
        if answer.id not in self._steps:
            self._steps[answer.id] = self._branch.store.steps(answer)
        return self._steps[answer.id]

    def settle(self) -> None:
        """Store the last answer, if that is not done. Raises SessionError as long as it fails."""
        if (turn := self.unstored) is None:
            return
        branch = self._branch
        try:
            turn.settle()
            if turn.answer is not None:
                self._steps.pop(turn.answer.id, None)  # stored with those of earlier parts
            tokens = branch.context_tokens  # as counted by the engine; `reload` knows only those of stored figures
            branch.reload(branch.leaf if turn.answer is None else turn.answer.id)
            branch.context_tokens = tokens
        except DeletedError:  # by another process: not tried again
            self.unstored = None
            with suppress(DeletedError):  # the session may be gone, too
                branch.reload(branch.store.session(branch.session.id).active_leaf)
            raise
        self.unstored = None
