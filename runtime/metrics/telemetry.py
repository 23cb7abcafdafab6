"""Records of decode steps and summaries of generations.

Bytes are computed from shapes (`runtime.metrics.cost`), not read from hardware counters. Seconds are monotonic wall
clock. A step's latency is t(k) - t(k - 1), of its end and the previous one's; for the first, the time since the end of
the prefill. The inter-token latency of a step with n tokens is latency / n for each. MBU (model bandwidth utilisation)
is achieved bandwidth over the memory bandwidth beside the steps, see `mbu`.

`Timeline` (`runtime/engine/timeline.py`) makes records and summaries; surfaces, stored sessions and `--json` have them
as they are, so a renamed field changes all their documents. docs/metrics.md explains the figures.

Guard: tests/runtime/metrics/test_telemetry.py.
"""

from collections.abc import Sequence

from msgspec import Struct, to_builtins
from msgspec.structs import asdict


class StepParts(Struct, frozen=True):
    """Seconds of a step by part, measured in the kernels; the rest of the step is other kernels and dispatch.

    weights_s, kv_s, sampling_s: products with weights, attention, token selection.
    waiting_s: the calling thread waited for others; not in the kernels' times.
    host_s: no step was queued.
    """

    weights_s: float
    kv_s: float
    sampling_s: float
    waiting_s: float
    host_s: float

    def named(self) -> dict[str, float]:
        """Return the seconds by the names that the decode view shows."""
        names = ("weights", "KV", "sampling", "waiting", "host")
        return dict(zip(names, (self.weights_s, self.kv_s, self.sampling_s, self.waiting_s, self.host_s), strict=True))


class RankTimes(Struct, frozen=True):
    """Seconds of a step on one rank: in its kernels, waiting for other ranks' kernels, and the rest, for collectives.

    The kernels' times are measured, those of other ranks as a mean of recent steps; the others are computed.
    """

    compute_s: float
    wait_s: float
    collective_s: float


def rank_times(step_s: float, compute_s: Sequence[float], staged: bool) -> tuple[RankTimes, ...]:
    """Return each rank's times of a step. staged: ranks compute one after the other, else at once."""
    busy = sum(compute_s) if staged else max(compute_s)
    scale = min(1.0, step_s / busy) if busy > 0 else 0.0
    rest = max(0.0, step_s - busy * scale)
    return tuple(RankTimes(seconds * scale, (busy - seconds) * scale, rest) for seconds in compute_s)


class PassFacts(Struct, frozen=True):
    """Facts of a step, which all its sequences share. The other fields are those of `StepRecord`.

    passes: each reads the weights; several if sequences take turns.
    """

    batch: int = 1
    passes: int = 1
    fed: int = 0
    gc_s: float = 0.0
    parts: StepParts | None = None
    ranks: tuple[RankTimes, ...] = ()


class StepRecord(Struct, frozen=True):
    """One step of one sequence.

    index: from 0, which feeds the prompt's last token.
    context: cache entries after the step.
    latency_s: since the step before, see above.
    weight_bytes: read by all passes of the step, for all its sequences.
    kv_bytes_read, kv_bytes_written: of this sequence.
    kv_used_bytes, kv_allocated_bytes: of its committed entries, and of its whole cache.
    active_memory_bytes, peak_memory_bytes: of the process, by MLX's allocator.
    batch: sequences in the step, whose passes read `weight_bytes` for all.
    proposed: draft tokens of `source` verified in it.
    accepted: those accepted, up to the end of the answer.
    fed: prompt tokens of other sequences computed in it.
    gc_s: time of Python's garbage collection in it.
    parts: None if the step was not timed.
    ranks: rank 0 first; () unless it was timed on several ranks.
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
    fed: int = 0
    gc_s: float = 0.0
    parts: StepParts | None = None
    ranks: tuple[RankTimes, ...] = ()

    @property
    def tokens(self) -> int:
        """Output tokens of the step, an end-of-turn token included."""
        return self.accepted + 1

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latency of each token in seconds; none of the first step."""
        if self.index == 0:
            return []
        return [self.latency_s / self.tokens] * self.tokens

    @property
    def step_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes_read + self.kv_bytes_written

    @property
    def achieved_gb_s(self) -> float:
        """Achieved bandwidth in GB/s (1 GB = 1e9 bytes)."""
        if self.latency_s <= 0:
            return 0.0
        return self.step_bytes / self.latency_s / 1e9

    def __deepcopy__(self, _memo: object) -> "StepRecord":
        return self  # nothing in it can change; the chat copies its figures with thousands of records


class Percentiles(Struct, frozen=True):
    """p50, p95, p99 and the maximum, in seconds."""

    p50: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Percentiles | None":
        """Return percentiles, interpolated between closest ranks as by numpy.percentile; None without values."""
        if not values:
            return None
        ordered = sorted(values)
        return cls(*(quantile(ordered, q) for q in (0.50, 0.95, 0.99, 1.0)))


def in_milliseconds(seconds: Percentiles | None) -> dict[str, float | None]:
    """Return milliseconds by name, for JSON; None for unknown ones."""
    if seconds is None:
        return dict.fromkeys(Percentiles.__struct_fields__)
    return {name: value * 1e3 for name, value in asdict(seconds).items()}


def quantile(ordered: Sequence[float], q: float) -> float:
    """Return the value at fraction `q` of sorted values, interpolated between the two nearest."""
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


class Summary(Struct, frozen=True):
    """Figures of one generation; None if there were too few steps.

    prompt_tokens, completion_tokens: of the prompt; of the output, without an end-of-turn token.
    first_step_s: latency of the first step.
    weight_bytes_per_step, kv_bytes_per_token: from shapes.
    kv_cache_bytes: of the committed entries at the end, as `KVCache.committed_bytes`.
    achieved_gb_s: bytes of the steps over their time, without the first step.
    peak_memory_bytes: of the process.
    queue_s: request submitted -> admitted, without tokenize_s.
    prefill_s: admitted -> end of prefill.
    ttft_s: prompt submitted -> first text or tool call; None without one, and of token ids alone.
    reused_tokens: prompt tokens found in the cache.
    prefill_tokens: computed before the first step, which computes the prompt's last token.
    steps: all, the one of the end-of-turn token included.
    step_latency, step_s: per step, and their mean, without the first step.
    itl: per token, an end-of-turn token included, without the first step.
    tpot_s: (t_last - t_first) / tokens, without the first step.
    proposed, accepted: draft tokens of all steps.
    busy: other programs slowed the steps down, so there is no mbu.

    An `Answer` counts queue_s from its prompt's submission, and sets ttft_s, tokenize_s, mbu and busy.
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
    tokenize_s: float = 0.0
    proposed: int = 0
    accepted: int = 0
    mbu: float | None = None
    busy: bool = False

    @property
    def prefill_tokens_per_second(self) -> float | None:
        if not self.prefill_tokens or self.prefill_s <= 0:
            return None
        return self.prefill_tokens / self.prefill_s

    @property
    def decode_tokens_per_second(self) -> float | None:
        if not self.tpot_s:
            return None
        return 1 / self.tpot_s

    @property
    def mean_step_bytes(self) -> int:
        """Mean bytes per step without the first; 0 if unknown."""
        if not self.achieved_gb_s or not self.step_s:
            return 0
        return round(self.achieved_gb_s * 1e9 * self.step_s)

    def document(self) -> dict[str, object]:
        """Return all fields and both rates, as they are stored and exported."""
        rates = ("prefill_tokens_per_second", "decode_tokens_per_second")
        stored: dict[str, object] = to_builtins(self)
        return stored | {name: getattr(self, name) for name in rates}


class PoolStats(Struct, frozen=True):
    """Numbers of K/V blocks, all layer groups; `shared` are those used by several sequences."""

    used: int
    shared: int
    cached: int
    free: int

    @property
    def total(self) -> int:
        return self.used + self.cached + self.free


class MBU(Struct, frozen=True):
    """Model bandwidth utilisation of decode steps.

    share: achieved bandwidth over `base_gb_s`; None if unknown, or if other programs slowed the steps down.
    base_gb_s: the memory bandwidth that the steps are compared with; None if unknown.
    measured_beside: `base_gb_s` was read beside the steps, else it is the measured peak.
    """

    share: float | None
    base_gb_s: float | None
    measured_beside: bool


def mbu(achieved_gb_s: float | None, memory_gb_s: float | None, peak_gb_s: float | None, *, busy: bool = False) -> MBU:
    """Return the MBU of steps.

    memory_gb_s: the bandwidth read beside them. If it is below `achieved_gb_s`, the reading was slowed down and the
    measured peak is used.
    busy: other programs slowed the steps down.
    """
    base = memory_gb_s
    if memory_gb_s is None or memory_gb_s < (achieved_gb_s or 0.0):
        base = peak_gb_s or memory_gb_s
    share = None
    if achieved_gb_s is not None and base and not busy:
        share = achieved_gb_s / base
    return MBU(share, base, base == memory_gb_s)
