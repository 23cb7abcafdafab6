"""One generation of a chat: its phase, and its answer in memory and in the store.

The message is created with the answer's first text. Later text is stored as it arrives, so that killing a process loses
at most the text that the chat has not received; a durable write every DURABLE_S bounds the loss of a power cut. A
summary is not stored as a message.

Guard: tests/app/chat/test_turn.py.
"""

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec.structs import replace

from headrace.app.answer.answer_steps import AnswerSteps
from headrace.app.engine.events import Abandoned, ContextFull, Delta, Done, Event, Failed, Prefill, Repeats
from headrace.app.sessions.database import storable
from headrace.app.sessions.records import Message
from headrace.app.sessions.store import SessionStore
from headrace.models.text.thinking import NO_TEXT, Kinds
from headrace.runtime.errors import SessionError
from headrace.runtime.metrics.telemetry import Summary

DURABLE_S = 2.0  # between two durable writes, see the module
RETRY_S = 2.0  # after the store has failed

TurnPhase = Literal["waiting", "prefill", "answering"]

_ids = itertools.count(1)  # unique over all conversations: late events never reach another answer


class Turn:
    """A generation, from its request to the stored end of its answer.

    leaf: the message that is answered or continued.
    answer: the message being written; None before its first text, and as long as it cannot be created.
    written: the text of the message, whether stored or not.
    context_tokens: of the prompt, then KV cache entries.
    model, sampling: stored with the answer, to be set before its first text.
    summary: text of a summary, which is no message.
    steps: of this generation.
    repeats: see `Repeats`.
    reason, metrics: of its end; None until then.
    is_stored: the answer and its end are in the store.
    """

    def __init__(
        self,
        store: SessionStore,
        leaf: Message,
        *,
        model: str | None = None,
        system: str | None = None,
        sampling: Mapping[str, object] | None = None,
        continuing: bool = False,
        summarising: bool = False,
        dropping: bool = False,
    ) -> None:
        """Take the message to answer.

        system: stored with the answer.
        continuing: `leaf` is the answer so far, which goes on.
        summarising: the text becomes `summary`.
        dropping: the engine may leave out older turns.
        Raises SessionError if nothing can be stored.
        """
        self.id = next(_ids)
        self.leaf = leaf
        self.continuing = continuing
        self.summarising = summarising
        self.dropping = dropping
        self.phase: TurnPhase = "waiting"
        self.context_tokens = 0
        self.answer: Message | None = None
        self.summary = ""
        self.repeats = False
        self.steps = AnswerSteps()
        self.model = model
        self.sampling = sampling
        self.reason: str | None = None
        self.is_stored = False
        self.metrics: Summary | None = None
        self.written = NO_TEXT
        self._old_length = 0
        self._has_text = False
        self._system = system
        self._store = store
        self._unsaved = ""  # text of `answer` that is not in the store yet
        self._durable_at = time.monotonic()
        self._retry_at = float("-inf")
        if continuing:
            self._old_length = len(leaf.content)
            self.written = leaf.by_kind
            if not summarising:
                self.answer = leaf
                store.reopen(leaf)

    def handle(self, event: Event) -> None:
        """Update the attributes, the text and the end. Raises SessionError if the message cannot be created."""
        match event:
            case Prefill():
                self.phase = "prefill"
                self.context_tokens = event.reused + event.total + 1  # the first step feeds the prompt's last token
            case Delta():
                self._add(event)
            case Repeats():
                self.repeats = True
            case Done():
                self.end(event.end.reason, event.end.summary)
            case ContextFull():
                self.end("length")
            case Failed():
                self.end("failed")
            case Abandoned():
                self.end("cancelled")

    def _add(self, delta: Delta) -> None:
        self.phase = "answering"
        if not self._has_text and delta.text:
            self._has_text = True
            self.steps.start = self._old_length + len(delta.opening)
        records = delta.records
        self.steps.texts += delta.steps
        self.steps.latencies_s += [record.latency_s for record in records]
        if records:
            self.context_tokens = records[-1].context
        if self.summarising:
            self.summary += delta.content
        elif delta.text or any(delta.kinds):
            self._append(delta.text, delta.kinds)

    def _append(self, text: str, kinds: Kinds) -> None:
        """Add text to the answer, and keep it for the store; the first text creates the message."""
        text = storable(text)
        self._unsaved += text
        self.written = self.written.grown(text, kinds)
        if self.answer is None:
            self.answer = self._store.begin_answer(
                self.leaf.session_id, self.leaf.id, self.model, sampling=self.sampling, system=self._system
            )
        self.answer = replace(self.answer, content=self.written.text, kinds=self.written.kinds, partial=True)

    def grown(self, branch: Sequence[Message]) -> list[Message]:
        """Return the branch with the answer at its end, as far as it is written."""
        if self.answer is None:
            return list(branch)
        if branch[-1].id == self.answer.id:
            branch = branch[:-1]
        return [*branch, self.answer]

    def end(self, reason: str, summary: Summary | None = None) -> None:
        """Set the end, which `save` and `settle` store."""
        self.reason = reason
        self.metrics = summary

    @property
    def retry_due(self) -> bool:
        """True unless storing failed within the last RETRY_S."""
        return time.monotonic() >= self._retry_at

    def save(self) -> None:
        """Call `settle` if `retry_due`."""
        if self.retry_due:
            self.settle()

    def settle(self) -> None:
        """Store the text that arrived, and the end if there is one. Raises SessionError: call it again then.

        The answer is complete only if the model ended it. The metrics are the last part's; a continuation without text
        keeps the old ones.
        """
        if self.is_stored:
            return
        try:
            if self.reason is None:
                self._grow()
            else:
                self._finish(self.reason)
        except SessionError:
            self._retry_at = time.monotonic() + RETRY_S
            raise

    def _finish(self, reason: str) -> None:
        """Store the end, after the text that is missing there."""
        # A model may end its answer without text, and a message may not have been created before: both are made here.
        has_answer = self._unsaved or (self.metrics is not None and reason != "cancelled")
        if self.answer is None and has_answer and not self.summarising:
            self._append("", Kinds())
        self._grow()
        if self.answer is not None:
            metrics = self.metrics
            steps = None
            if self.continuing and len(self.answer.content) == self._old_length:  # nothing was added
                metrics = self.leaf.metrics
            elif self.steps.texts:
                before = None
                if self.continuing:
                    before = self._store.steps(self.leaf)
                steps = self.steps.joined_to(before)
            kinds = self.answer.by_kind.ended().kinds
            self._store.finish(self.answer.id, reason, metrics, partial=reason != "stop", steps=steps, kinds=kinds)
        self.is_stored = True

    def _grow(self) -> None:
        """Store the text that arrived, on the disk for good every DURABLE_S."""
        if not self._unsaved or self.answer is None:
            return
        now = time.monotonic()
        durable = now >= self._durable_at + DURABLE_S
        self._store.grow(self.answer.id, self._unsaved, durable=durable)
        self._unsaved = ""
        if durable:
            self._durable_at = now
