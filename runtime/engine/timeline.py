"""The stopwatch of one generation: when what happened, the record of each step, the summary at the end.

The engine's figures of an answer come from here; definitions in `runtime.metrics.telemetry`. What takes time before the
engine, such as tokenizing, is measured in `app`.

    submitted -- queue_s -- admitted -- prefill_s -- prefilled -- first step -- second step -- ...

Each sequence has one. The engine calls `admitted`, `prefilled` and `step_done` as soon as the event has happened. A
step's latency counts from the step before it, and that of the first step from the end of prefill.
tests/runtime/engine/test_timeline.py has made-up clocks for which every figure is known.
"""

import time
from array import array
from collections.abc import Callable
from math import fsum

import mlx.core as mx

from headrace.runtime.kv.cache import KVCache
from headrace.runtime.metrics.cost import StepCost
from headrace.runtime.metrics.telemetry import PassFacts, Percentiles, StepRecord, Summary

_ALONE = PassFacts()  # of a batch of one sequence, without measured parts


class Timeline:
    """Started when a request is submitted. `clock` gives seconds and must be monotonic."""

    def __init__(
        self,
        *,
        cost: StepCost,
        prompt_tokens: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._cost = cost
        self._prompt_tokens = prompt_tokens
        self._reused_tokens = 0
        self._clock = clock
        self._submitted = clock()
        self._admitted = self._submitted
        self._prefilled = self._submitted
        self._last = self._submitted  # when the newest step's token could be read; before the first step: `_prefilled`
        self._latencies = array("d")  # of each step, as its record has it
        self._tokens = array("l")  # output tokens of each step
        self._proposed = 0
        self._bytes = 0  # moved by all steps but the first, whose latency is not an inter-token latency

    def admitted(self, reused_tokens: int) -> None:
        """Its turn has come: everything up to here was waiting. So many tokens of the prompt are in the cache."""
        self._reused_tokens = reused_tokens
        self._admitted = self._clock()
        self._prefilled = self._admitted
        self._last = self._admitted

    def prefilled(self) -> None:
        """Record that a chunk of the prompt is done. All until now was prefill; after the last, decode starts."""
        self._prefilled = self._clock()
        self._last = self._prefilled

    @property
    def prefill_s(self) -> float:
        """Seconds from the admission to the end of the latest chunk of the prompt."""
        return self._prefilled - self._admitted

    def step_done(
        self,
        cache: KVCache,
        shared: PassFacts = _ALONE,
        tokens: int = 1,
        proposed: int = 0,
        source: str | None = None,
    ) -> StepRecord:
        """Return the record of a step whose tokens were read and committed.

        cache: of the sequence, with the step's entries committed.
        shared: facts of its batch.
        tokens: its output tokens.
        proposed: draft tokens that were verified in it.
        source: proposer of these; None without.
        """
        now = self._clock()
        latency = now - self._last
        self._last = now
        self._latencies.append(latency)
        self._tokens.append(tokens)
        self._proposed += proposed
        rows = 1 + proposed  # of the sequence in the pass: its known token, and the draft tokens
        past = cache.committed - tokens  # entries before the step
        record = StepRecord(
            index=len(self._latencies) - 1,
            context=cache.committed,
            latency_s=latency,
            weight_bytes=shared.passes * self._cost.weight_bytes,
            kv_bytes_read=self._cost.kv_bytes_read(past + proposed),  # by all rows of the sequence at once
            kv_bytes_written=self._cost.kv_bytes_written(rows),
            kv_used_bytes=cache.committed_bytes,
            kv_allocated_bytes=cache.allocated_bytes,
            active_memory_bytes=mx.get_active_memory(),
            peak_memory_bytes=mx.get_peak_memory(),
            batch=shared.batch,
            proposed=proposed,
            accepted=tokens - 1,
            source=source,
            fed=shared.fed,
            gc_s=shared.gc_s,
            parts=shared.parts,
            ranks=shared.ranks,
        )
        if len(self._latencies) > 1:
            self._bytes += record.step_bytes
        return record

    def discard_tokens(self, tokens: int) -> None:
        """Subtract the last tokens of the newest step: the answer had ended before them.

        The step may be left with none. Its latency still counts as decoding, but no token has a part of it.
        """
        if tokens > 0:
            self._tokens[-1] -= tokens

    def summary(self, cache: KVCache | None, completion_tokens: int) -> Summary:
        """Return the figures of the generation so far; those of the steps come from their records alone.

        cache: None of a request whose turn never came.
        """
        committed = 0
        committed_bytes = 0
        if cache is not None:
            committed = cache.committed
            committed_bytes = cache.committed_bytes
        steps = self._latencies[1:]
        itl: list[float] = []  # inter-token latencies
        for latency, count in zip(steps, self._tokens[1:], strict=True):
            # Accepted draft tokens come with their step: its latency is divided among its tokens.
            if count:  # 0 if `discard_tokens` took all tokens of the step
                itl += [latency / count] * count
        decode_s = fsum(steps)  # t_last - t_first
        return Summary(
            prompt_tokens=self._prompt_tokens,
            reused_tokens=self._reused_tokens,
            # The first step feeds the prompt's last token, so prefill ends one before it. Entries of the output are
            # committed, too, and a request that ended during its prefill has fewer.
            prefill_tokens=max(0, min(committed, self._prompt_tokens - 1) - self._reused_tokens),
            completion_tokens=completion_tokens,
            steps=len(self._latencies),
            queue_s=self._admitted - self._submitted,
            prefill_s=self.prefill_s,
            first_step_s=next(iter(self._latencies), None),
            ttft_s=None,  # an `Answer` knows which step gave the first output
            step_latency=Percentiles.of(steps),
            step_s=_mean(decode_s, len(steps)),
            itl=Percentiles.of(itl),
            tpot_s=_mean(decode_s, len(itl)),
            weight_bytes_per_step=self._cost.weight_bytes,
            kv_bytes_per_token=self._cost.kv_bytes_per_token,
            kv_cache_bytes=committed_bytes,
            achieved_gb_s=self._bytes / decode_s / 1e9 if decode_s > 0 else None,
            peak_memory_bytes=mx.get_peak_memory(),
            proposed=self._proposed,
            # A step has one token that is no draft. A step without tokens (`discard_tokens`) has no draft either.
            accepted=sum(max(0, count - 1) for count in self._tokens),
        )


def _mean(total: float, count: int) -> float | None:
    """Return total / count; None of nothing."""
    if not count:
        return None
    return total / count
