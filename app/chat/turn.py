"""One generation of a chat: the answer as it grows, in memory and in the store.

A turn writes its message from its first text on; before that there is nothing to keep. What comes then is put into the
store whenever it comes, so that killing a process costs at most what the chat has not received; every DURABLE_S it is
put on the disk, which is what a power cut can cost. A turn that summarises writes no message at all.
"""

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from headrace.app.engine.messages import Done
from headrace.app.sessions.database import storable
from headrace.app.sessions.records import Message, TurnMetrics
from headrace.app.sessions.store import SessionStore
from headrace.runtime.errors import SessionError

DURABLE_S = 2.0
RETRY_S = 2.0  # after the store has failed

_ids = itertools.count(1)  # over all conversations: a late event never meets another's answer


class Turn:
    """leaf: the message that is answered or continued. answer: the message being written, once there is one."""

    def __init__(
        self,
        store: SessionStore,
        leaf: Message,
        *,
        model: str | None = None,
        system: str | None = None,
        continuing: bool = False,
        summarising: bool = False,
        dropping: bool = False,
    ) -> None:
        """`model` is who will say it, as far as known, `system` with which system prompt; `dropping`: the engine may
        leave out older turns.

        Raises SessionError where nothing can be stored.
        """
        self.id = next(_ids)
        self.leaf = leaf
        self.continuing = continuing
        self.summarising = summarising
        self.dropping = dropping
        self.answer = leaf if continuing and not summarising else None
        self.summary = ""
        self.guessed: list[tuple[int, int]] = []
        """Where in the answer is what had been guessed (begin, end): for whoever looks on, never stored."""
        self._begins = len(leaf.content) if continuing else 0  # characters of the answer that are not this turn's
        self.sampling: Mapping[str, Any] | None = None
        """The settings in effect, to be set as soon as they are known."""
        self._model, self._system = model, system
        self._store = store
        self._unsaved = ""
        self._durable_at = time.monotonic()
        self._retry_at = float("-inf")  # not before
        if self.answer is not None:
            store.reopen(leaf)

    def grow(self, text: str, model: str | None = None, guessed: Sequence[tuple[int, int]] = ()) -> None:
        """More of the answer; `model` is who says it, `guessed` where in it is what had been guessed.

        Raises SessionError where the message cannot be begun.
        """
        if self.summarising:
            self.summary += text
            return
        text = storable(text)
        said = len(self._unsaved if self.answer is None else self.answer.content)
        self._unsaved += text
        self.guessed += [(said + begin, said + end) for begin, end in guessed]
        self._model = model or self._model
        if self.answer is None:
            self.answer = self._store.begin_answer(
                self.leaf.session_id, self.leaf.id, self._model, sampling=self.sampling, system=self._system
            )
            text = self._unsaved  # with what could not be put anywhere when the store failed before
        self.answer = replace(self.answer, content=self.answer.content + text, partial=True)

    def save(self) -> None:
        """Put what came into the store. Raises SessionError, then does nothing for RETRY_S."""
        if time.monotonic() >= self._retry_at:
            self._save()

    def end(self, reason: str, done: Done | None = None) -> None:
        """The answer is over; it is whole only if the model ended it itself.

        An answer that was continued in vain keeps the metrics it had; else they are the last part's. Raises
        SessionError where it cannot be stored: to be called again then.
        """
        an_answer = self._unsaved or (done is not None and reason != "cancelled")  # be it an empty one
        if self.answer is None and an_answer:
            self.grow("")
        self._save()
        if self.answer is not None:
            went = turn_metrics(done) if done is not None else None
            if self.continuing and len(self.answer.content) == self._begins:
                went = self.leaf.metrics
            self._store.finish(self.answer.id, reason, went, partial=reason != "stop")

    def _save(self) -> None:
        if not self._unsaved or self.answer is None:
            return
        now = time.monotonic()
        durable = now >= self._durable_at + DURABLE_S
        try:
            self._store.grow(self.answer.id, self._unsaved, durable=durable)
        except SessionError:
            self._retry_at = now + RETRY_S
            raise
        self._unsaved = ""
        if durable:
            self._durable_at = now


def turn_metrics(done: Done) -> TurnMetrics:
    """What is stored of how an answer went."""
    summary = done.summary
    return TurnMetrics(
        prompt_tokens=summary.prompt_tokens,
        reused_tokens=summary.reused_tokens,
        completion_tokens=summary.completion_tokens,
        ttft_s=done.ttft_s,
        prefill_tokens_per_second=summary.prefill_tokens_per_second,
        decode_tokens_per_second=summary.decode_tokens_per_second,
        achieved_gb_s=summary.achieved_gb_s,
        mbu=done.mbu,
        kv_cache_bytes=summary.kv_cache_bytes,
    )
