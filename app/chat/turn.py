"""One generation of a chat: the answer as it grows, in memory and in the store.

A turn writes its message from its first text on; before that there is nothing to keep. What comes then is put into the
store every SAVE_S, for power cuts and for other readers: no crash of ours costs it, because the engine keeps a journal
(see `app.sessions.journal`). A turn that summarises writes no message at all.
"""

import itertools
import time
from contextlib import suppress
from dataclasses import replace

from headrace.app.engine.messages import Done
from headrace.app.sessions.journal import Answer, Journal, storable
from headrace.app.sessions.records import Message, TurnFigures
from headrace.app.sessions.store import SessionStore

SAVE_S = 2.0

_ids = itertools.count(1)  # over all conversations: a late event never meets another's answer


class Turn:
    """leaf: the message that is answered or continued. answer: the message being written, once there is one."""

    def __init__(
        self,
        store: SessionStore,
        leaf: Message,
        *,
        model: str | None = None,
        continuing: bool = False,
        summarising: bool = False,
        dropping: bool = False,
    ) -> None:
        """`model` is who will say it, as far as known; `dropping`: the engine may leave out older turns.

        Raises SessionError where nothing can be stored.
        """
        self.id = next(_ids)
        self.leaf = leaf
        self.continuing = continuing
        self.summarising = summarising
        self.dropping = dropping
        self.answer = leaf if continuing and not summarising else None
        self.summary = ""
        self._begins = len(leaf.content) if continuing else 0  # characters of the answer that are not this turn's
        self._model = model
        self._store = store
        self._unsaved = ""
        self._saved_at = float("-inf")
        self._journal: Journal | None = None
        if summarising:
            return
        if continuing:
            store.reopen(leaf.id)
        self._message_id = leaf.id if continuing else store.reserve_message()
        parent = leaf.parent_id if continuing else leaf.id
        with suppress(OSError):  # a file system without locks: a crash may cost what `save` has not saved
            answer = Answer(leaf.session_id, self._message_id, parent, model, self._begins)
            self._journal = Journal(store.journals, answer)

    @property
    def journal(self) -> str | None:
        """The file for the engine to write what it says into."""
        return str(self._journal.path) if self._journal is not None else None

    def grow(self, text: str, model: str | None = None) -> None:
        """More of the answer; `model` is who says it. Raises SessionError where the message cannot be begun."""
        if self.summarising:
            self.summary += text
            return
        text = storable(text)
        self._unsaved += text
        self._model = model or self._model
        if self.answer is None:
            self.answer = self._store.begin_answer(self.leaf.session_id, self.leaf.id, self._model, self._message_id)
            text = self._unsaved  # with what could not be put anywhere when the store failed before
        self.answer = replace(self.answer, content=self.answer.content + text, partial=True)

    def save(self) -> None:
        """Put what came into the store, if the last time is long enough ago."""
        if time.monotonic() >= self._saved_at + SAVE_S:
            self._save()

    def end(self, reason: str, done: Done | None = None) -> None:
        """The answer is over; it is whole only if the model ended it itself.

        An answer that was continued in vain keeps the figures it had; else they are the last part's. Raises
        SessionError where it cannot be stored: to be called again then, or `abandon`.
        """
        missing = self._not_received()
        an_answer = self._unsaved or (done is not None and reason != "cancelled")  # be it an empty one
        if missing or (self.answer is None and an_answer):
            self.grow(missing)
        self._save()
        if self.answer is not None:
            went = figures(done) if done is not None else None
            if self.continuing and len(self.answer.content) == self._begins:
                went = self.leaf.figures
            self._store.finish(self.answer.id, reason, went, partial=reason != "stop")
        if self._journal is not None:
            self._journal.remove()
            self._journal = None

    def abandon(self) -> bool:
        """Leave it to the journal, for whoever opens the store next; whether there is one."""
        if self._journal is None:
            return False
        self._journal.abandon()
        self._journal = None
        return True

    def _not_received(self) -> str:
        """What a killed engine said and did not come to send."""
        if self._journal is None:
            return ""
        received = len(self.answer.content) - self._begins if self.answer is not None else len(self._unsaved)
        return self._journal.text()[received:]

    def _save(self) -> None:
        self._saved_at = time.monotonic()
        if self._unsaved and self.answer is not None:
            self._store.grow(self.answer.id, self._unsaved)
            self._unsaved = ""


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
