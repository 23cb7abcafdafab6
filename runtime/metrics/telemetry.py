"""What every decode step leaves behind, and what a generation sums up to.

Bytes are computed from shapes (see `runtime.metrics.cost`), never read from a hardware counter. Seconds are wall clock,
monotonic. A step's latency is t(k) - t(k - 1), when it was done and the one before; for the first it is the time since
prefill ended. A step that says several tokens gives each an inter-token latency of its latency over their number.
MBU (model bandwidth utilisation) is achieved bandwidth over the machine's measured peak.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from operator import attrgetter
from typing import Any


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of one sequence. `context` counts the cache entries there are after it, its own included.

    batch: sequences that took part in its pass, which read `weight_bytes` once for all of them. proposed: tokens that
    were guessed by `source` and verified in it; accepted: those of them that were right, up to the end of the answer.
    """

    index: int
    context: int
    latency_s: float
    weight_bytes: int
    kv_bytes_read: int
    kv_bytes_written: int
    kv_used_bytes: int
    kv_allocated_bytes: int
    active_memory_bytes: int
    peak_memory_bytes: int
    batch: int = 1
    proposed: int = 0
    accepted: int = 0
    source: str | None = None

    def __reduce__(self) -> tuple[type["StepRecord"], tuple[Any, ...]]:
        """As its values: one is sent per token, and what a frozen dataclass does by itself takes five times as long."""
        return StepRecord, _values(self)

    @property
    def tokens(self) -> int:
        """Tokens that it said, an end-of-turn token included."""
        return self.accepted + 1

    @property
    def step_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes_read + self.kv_bytes_written

    @property
    def achieved_gb_s(self) -> float:
        """Achieved bandwidth in GB/s (1 GB = 1e9 bytes)."""
        return self.step_bytes / self.latency_s / 1e9 if self.latency_s > 0 else 0.0


_values = attrgetter(*(field.name for field in fields(StepRecord)))


@dataclass(frozen=True, slots=True)
class Percentiles:
    """p50, p95, p99 and the maximum, in seconds."""

    p50: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Percentiles | None":
        """Linear interpolation between closest ranks (the default of numpy.percentile). None of nothing."""
        if not values:
            return None
        ordered = sorted(values)
        return cls(*(quantile(ordered, q) for q in (0.50, 0.95, 0.99, 1.0)))


def in_milliseconds(seconds: Percentiles | None) -> dict[str, float | None]:
    """As JSON documents have them, by name; null where there are none."""
    if seconds is None:
        return dict.fromkeys(field.name for field in fields(Percentiles))
    return {name: value * 1e3 for name, value in asdict(seconds).items()}


def quantile(ordered: Sequence[float], q: float) -> float:
    """The value at the fraction `q` of sorted values, interpolated between the two nearest."""
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


@dataclass(frozen=True, slots=True)
class Summary:
    """A generation in figures. None where too few steps make a figure meaningless.

    queue_s: request submitted -> its turn, beside others or alone. prefill_s: from there to the end of the prefill.
    ttft_s: request submitted -> first token ready (the app adds tokenisation, which happens before the engine).
    reused_tokens: prompt tokens found in the cache kept from the request before. prefill_tokens: fed before the first
    step, which feeds the prompt's last token. steps includes the one that chose the end-of-turn token.
    All that follows leaves out the first step: step_latency is of steps and step_s their mean, itl is of tokens, an
    end-of-turn token included, and tpot_s = (t_last - t_first) / those tokens. proposed, accepted: of all steps.
    """

    prompt_tokens: int
    reused_tokens: int
    prefill_tokens: int
    completion_tokens: int
    steps: int
    prefill_s: float
    first_step_s: float | None
    ttft_s: float | None
    step_latency: Percentiles | None
    step_s: float | None
    itl: Percentiles | None
    tpot_s: float | None
    weight_bytes_per_step: int
    kv_bytes_per_token: int
    kv_cache_bytes: int
    achieved_gb_s: float | None
    peak_memory_bytes: int
    queue_s: float = 0.0
    proposed: int = 0
    accepted: int = 0

    @property
    def prefill_tokens_per_second(self) -> float | None:
        fed = self.prefill_tokens
        return fed / self.prefill_s if fed and self.prefill_s > 0 else None

    @property
    def decode_tokens_per_second(self) -> float | None:
        return 1 / self.tpot_s if self.tpot_s else None

    @property
    def mean_step_bytes(self) -> int:
        """What a step moved, the first left out; 0 where no other is known."""
        return round(self.achieved_gb_s * 1e9 * self.step_s) if self.achieved_gb_s and self.step_s else 0


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Blocks of K/V, all layer groups: used ones (of them those that several sequences hold), cached and free ones."""

    used: int
    shared: int
    cached: int
    free: int

    @property
    def total(self) -> int:
        return self.used + self.cached + self.free


def mbu(achieved_gb_s: float | None, measured_peak_gb_s: float | None) -> float | None:
    """Model bandwidth utilisation, a fraction. None until both sides are known."""
    return achieved_gb_s / measured_peak_gb_s if achieved_gb_s is not None and measured_peak_gb_s else None
