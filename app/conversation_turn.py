"""One generation of a chat: the answer as it grows, in memory and in the store.

A turn writes its message from its first text on; before that there is nothing to keep. A turn that summarises
writes no message at all.
"""

import itertools
from dataclasses import replace

from app.engine_messages import Done
from app.sessions.records import Message, TurnFigures
from app.sessions.store import SessionStore

_ids = itertools.count(1)  # over all conversations: a late event never meets another's answer


class Turn:
    """leaf: the message that is answered or continued. answer: the message being written, once there is one."""

    def __init__(
        self, store: SessionStore, leaf: Message, *, continuing: bool = False, summarising: bool = False
    ) -> None:
        self.id = next(_ids)
        self.leaf = leaf
        self.continuing = continuing
        self.summarising = summarising
        self.answer = leaf if continuing and not summarising else None
        self.summary = ""
        self._store = store
        self._unsaved = ""

    def grow(self, text: str, model: str | None) -> None:
        """More of the answer; `model` is who says it. Raises SessionError where the message cannot be begun."""
        text = text.replace("\0", "\ufffd")  # as the store will have it: no database likes NUL in a text
        if self.summarising:
            self.summary += text
            return
        self._unsaved += text
        if self.answer is None:
            self.answer = self._store.begin_answer(self.leaf.session_id, self.leaf.id, model)
            text = self._unsaved  # with what could not be put anywhere when the store failed before
        self.answer = replace(self.answer, content=self.answer.content + text, partial=True)

    def save(self) -> None:
        """Put what came since the last call into the store."""
        if self._unsaved and self.answer is not None:
            self._store.grow(self.answer.id, self._unsaved)
            self._unsaved = ""

    def end(self, reason: str, figures: TurnFigures | None = None) -> None:
        """The answer is over; it is whole only if the model ended it itself."""
        self.save()
        if self.answer is not None:
            self._store.finish(self.answer.id, reason, figures, partial=reason != "stop")


def figures(done: Done) -> TurnFigures:
    """What is stored of how an answer went."""
    summary = done.summary
    return TurnFigures(
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
