"""The branch as the transcript shows it: messages, placeholders and their states.

The store is asked for branches only after the branch changed.

`ChatView.sync` calls both methods with every poll that has news. Indices are those of the shown list, which may have
the context mark and a placeholder for an answer without text, so they are not those of the conversation.
tests/tui/test_chat.py guards this.
"""

from typing import NamedTuple

from msgspec.structs import replace

from headrace.app.answer.answer_steps import AnswerSteps
from headrace.app.answer.first_pass import first_pass_text
from headrace.app.chat.conversation import Conversation
from headrace.app.sessions.records import Message
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.transcript.context_mark import mark_message, pending_answer
from headrace.app.tui.transcript.draft_marks import DraftMarks
from headrace.app.tui.transcript.entry import MessageState


class _MadeMarks(NamedTuple):
    """Marks of an answer, and its steps when they were made."""

    steps: AnswerSteps
    num_steps: int
    marks: DraftMarks


class ShownBranch:
    """Call `messages`, then `message_states` for the result."""

    def __init__(self) -> None:
        self._messages: list[Message] = []  # as shown, with the mark and a placeholder
        self._structure: tuple[object, ...] = ()  # all that states and the mark depend on
        self._mark = mark_message("", "")
        self._states: list[MessageState] = []  # of the shown messages
        self._made: dict[int, _MadeMarks] = {}  # by id of the message

    def messages(self, conversation: Conversation) -> list[Message]:
        """Return the messages to show, first to last."""
        messages = list(conversation.messages)
        if conversation.phase != "idle" and (not messages or messages[-1].role == "user"):
            messages.append(pending_answer(conversation.session.id))
        left_out = conversation.branch.not_sent
        summary = conversation.session.summary
        structure = (tuple(m.id for m in messages), conversation.phase == "idle", left_out, summary)
        if structure != self._structure:
            self._structure = structure
            self._states = [_branch_state(conversation, number, message) for number, message in enumerate(messages)]
            self._mark = mark_message(conversation.session.id, summary)
            if left_out:
                self._states.insert(left_out, MessageState(left_out=left_out))
        if left_out:
            messages.insert(left_out, self._mark)
        self._messages = messages
        return messages

    def message_states(
        self, conversation: Conversation, metrics: LiveMetrics, *, drafts: bool = False
    ) -> list[MessageState]:
        """Return the messages' states; the growing one has a progress text until its first token.

        drafts: mark draft tokens.
        """
        message_states = list(self._states)
        if conversation.phase != "idle" and self._messages and self._messages[-1].role == "assistant":
            last = message_states[-1]
            waiting = _waiting(conversation, metrics)
            message_states[-1] = MessageState(last.branch, last.branches, last.sent, growing=True, waiting=waiting)
        if drafts:
            for index, message in enumerate(self._messages):
                if message.role != "assistant" or message.id <= 0:  # a question, or a stand-in
                    continue
                marks = self._marks(conversation, message)
                if marks:
                    message_states[index] = replace(message_states[index], drafts=marks)
        return message_states

    def _marks(self, conversation: Conversation, message: Message) -> DraftMarks | None:
        """Return the marks of an answer; they are made again for new steps only."""
        if (steps := conversation.writer.steps_of(message)) is None:
            return None
        made = self._made.get(message.id)
        if made is None or made.steps is not steps or made.num_steps != len(steps.texts):
            made = _MadeMarks(steps, len(steps.texts), DraftMarks.of(steps))
            self._made[message.id] = made
        return made.marks


def _branch_state(conversation: Conversation, number: int, message: Message) -> MessageState:
    """Return a message's place among its branches. number: of the message, from 0."""
    shown = 0
    count = 1
    if message.id > 0:  # a stored one
        branches = conversation.branch.alternatives(message.id)
        shown = branches.shown
        count = len(branches.ids)
    return MessageState(shown, count, sent=number >= conversation.branch.not_sent)


def _waiting(conversation: Conversation, metrics: LiveMetrics) -> str:
    """Return the progress text of an answer without text."""
    if conversation.phase == "summarising":
        return "summarising older messages …"
    if conversation.phase == "waiting" and conversation.engine.state == "loading":
        return "waiting for the model to load …"
    if (slow := metrics.first_pass) is not None:
        return first_pass_text(slow.seconds)
    if metrics.phase == "prefill" and metrics.answer.prefill_total:
        reused = f", {metrics.answer.reused:,} cached" if metrics.answer.reused else ""
        return f"prefill: {metrics.answer.prefill_done:,} of {metrics.answer.prefill_total:,} tokens{reused}"
    return "▍"
