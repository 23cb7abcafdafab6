"""The end of a sequence: its last event, then its memory.

An end is reported at once. The cache is released at the beginning of the next step, when the user has the last event.

    finish (or `end_on_error`) -> release -> the sequence has neither cache nor sampler

So between two steps the engine's user may still read the cache of a sequence that has ended, with three exceptions:

- If other sequences wait, a step releases the caches of those that it ends at its beginning (`Engine._end_due`).
- `Engine.generate` releases when it is done or closed.
- `drop_all` releases no cache: its caller clears the backend.

The reserved memory is returned in all cases, by `_forget_state`.

Guards: tests/runtime/engine/test_engine.py, test_many_sequences.py and test_pool_full.py.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headrace.runtime.engine.kv_budget import KVBudget
from headrace.runtime.engine.request import Finished, FinishReason, SequenceFailed
from headrace.runtime.engine.scheduler import Scheduler
from headrace.runtime.engine.sequence import Delivery, Sequence
from headrace.runtime.errors import expected
from headrace.runtime.kv.backend import KVBackend
from headrace.runtime.kv.cache import KVCache
from headrace.runtime.machine.out_of_memory import is_out_of_memory
from headrace.runtime.metrics.telemetry import StepRecord
from headrace.runtime.speculation.ngram import RecentAnswers


class Ending:
    """Ends the sequences of one engine. on_release: called before a sequence's cache is released."""

    def __init__(self, kv: KVBackend, scheduler: Scheduler, budget: KVBudget) -> None:
        self._kv = kv
        self._scheduler = scheduler
        self._budget = budget
        self._ended: list[Sequence] = []  # whose caches are not released yet
        self.on_release: Callable[[Sequence], None] | None = None

    def __bool__(self) -> bool:
        """True if caches are to be released."""
        return bool(self._ended)

    def finish(
        self, sequence: Sequence, reason: FinishReason, stop_id: int | None = None, record: StepRecord | None = None
    ) -> Finished:
        """End a sequence and return its last event. `Finished` explains the parameters."""
        after = sequence.request.cancel.after
        if after is not None and sequence.output_count >= after:  # the answer may end within a step
            discarded = sequence.output_count - after
            if sequence.stop_id is not None:  # of the same step, which counts it, while `output_count` does not
                discarded += 1
            sequence.timeline.discard_tokens(discarded)
            sequence.output_count = after
        summary = sequence.timeline.summary(sequence.cache, sequence.output_count)
        self.end(sequence)
        sampling = sequence.request.sampling
        return Finished(
            reason,
            summary,
            stop_id,
            record,
            is_full=sequence.output_count >= sequence.context_output,
            seed=None if sampling.greedy else sampling.seed,
        )

    def end(self, sequence: Sequence) -> None:
        """End a sequence. The entry of an in-flight token is committed, draft tokens are rolled back."""
        if sequence.cache is not None:
            sequence.cache.commit(sequence.cache.length - sequence.cache.committed - sequence.draft_entries)
            if sequence.draft_entries:
                sequence.cache.rollback()
        self._scheduler.remove(sequence)
        self._ended.append(sequence)

    @contextmanager
    def end_on_error(self, sequence: Sequence, events: list[Delivery]) -> Iterator[None]:
        """End this sequence alone at an error raised within; `events` gets a `SequenceFailed`.

        Memory that runs out is an error of all sequences, and is raised.
        """
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error) or sequence.state == "finished":
                raise
            self._scheduler.remove(sequence)
            sequence.failed = True
            self._ended.append(sequence)
            events.append((sequence, SequenceFailed(expected(error))))

    def release(self, recent: RecentAnswers) -> None:
        """Release the caches of ended sequences. recent: gets the answers that draft tokens may come from."""
        for sequence in self._ended:
            if sequence.proposers:
                recent.add(sequence.tokens[len(sequence.request.prompt) :])
            if sequence.cache is not None:  # None if it ended while it waited
                self._release_cache(sequence, sequence.cache)
            self._forget_state(sequence)
        self._ended.clear()

    def _release_cache(self, sequence: Sequence, cache: KVCache) -> None:
        if self.on_release is not None:
            self.on_release(sequence)
        if sequence.failed:  # its entries may be wrong: none are kept
            cache.close()
        else:
            self._kv.release(cache, sequence.tokens)

    def drop_all(self) -> None:
        """End all sequences without events, and forget their caches: the backend is cleared next."""
        for sequence in list(self._scheduler):
            self._scheduler.remove(sequence)
            self._ended.append(sequence)
        for sequence in self._ended:
            self._forget_state(sequence)
        self._ended.clear()

    def _forget_state(self, sequence: Sequence) -> None:
        """Drop all that takes memory, and release the reservation. The cache was released or cleared before."""
        if sequence.mtp is not None:
            sequence.mtp.close()
        sequence.cache = None
        sequence.sampler = None  # users may keep the sequence
        sequence.proposers = []
        sequence.mtp = None
        self._budget.release(sequence)
