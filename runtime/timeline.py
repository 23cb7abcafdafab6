"""The stopwatch of one generation: when what happened, the record of each step, the summary at the end.

The only place that turns clock readings into the figures people see; definitions in `runtime.telemetry`.
"""

import time
from array import array
from collections.abc import Callable
from math import fsum

import mlx.core as mx

from headrace.runtime.cache import Cache
from headrace.runtime.cost import StepCost
from headrace.runtime.telemetry import Percentiles, StepRecord, Summary


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
        self._kv_written = cost.kv_bytes_written()
        self._prompt_tokens = prompt_tokens
        self._reused_tokens = 0
        self._clock = clock
        self._submitted = clock()
        self._admitted = self._prefilled = self._submitted
        self._last = self._submitted  # when the newest step's token could be read
        self._latencies = array("d")  # of each step, as its record has it
        self._bytes = 0  # moved by all steps but the first, whose latency is not an inter-token latency

    def admitted(self, reused_tokens: int) -> None:
        """Its turn has come: everything up to here was waiting. So many tokens of the prompt are in the cache."""
        self._reused_tokens = reused_tokens
        self._admitted = self._prefilled = self._clock()

    def prefill_done(self) -> None:
        """Everything up to here was prefill; decode starts now."""
        self._prefilled = self._clock()

    def step_done(self, cache: Cache, batch: int = 1) -> StepRecord:
        """A step's token has been read and its entry committed. `batch` sequences took part in its pass."""
        now = self._clock()
        latency = now - (self._last if self._latencies else self._prefilled)
        self._last = now
        self._latencies.append(latency)
        past = cache.committed - 1
        record = StepRecord(
            index=len(self._latencies) - 1,
            context=cache.committed,
            latency_s=latency,
            weight_bytes=self._cost.weight_bytes,
            kv_bytes_read=self._cost.kv_bytes_read(past),
            kv_bytes_written=self._kv_written,
            kv_used_bytes=cache.committed_bytes,
            kv_allocated_bytes=cache.allocated_bytes,
            active_memory_bytes=mx.get_active_memory(),
            peak_memory_bytes=mx.get_peak_memory(),
            batch=batch,
        )
        if len(self._latencies) > 1:
            self._bytes += record.step_bytes
        return record

    def summary(self, cache: Cache | None, completion_tokens: int) -> Summary:
        """The generation so far, in figures; those of the steps come from their records, and from nothing else.

        cache: None of a request whose turn never came.
        """
        committed, held = (cache.committed, cache.committed_bytes) if cache else (0, 0)
        first, itl = self._latencies[:1], self._latencies[1:]
        decode_s = fsum(itl)  # t_last - t_first
        return Summary(
            prompt_tokens=self._prompt_tokens,
            reused_tokens=self._reused_tokens,
            prefill_tokens=max(0, min(committed, self._prompt_tokens - 1) - self._reused_tokens),
            completion_tokens=completion_tokens,
            steps=len(self._latencies),
            queue_s=self._admitted - self._submitted,
            prefill_s=self._prefilled - self._admitted,
            first_step_s=first[0] if first else None,
            ttft_s=self._prefilled - self._submitted + first[0] if first else None,
            itl=Percentiles.of(itl),
            tpot_s=decode_s / len(itl) if itl else None,
            weight_bytes_per_step=self._cost.weight_bytes,
            kv_bytes_per_token=self._cost.kv_bytes_per_token,
            kv_cache_bytes=held,
            achieved_gb_s=self._bytes / decode_s / 1e9 if decode_s > 0 else None,
            peak_memory_bytes=mx.get_peak_memory(),
        )
