"""Sums over decode steps, and the rates that follow: of a second, a turn or a batch, by context length, and energy.

A speed or a bandwidth of the decode view is a property of `StepTotals`. `LiveMetrics` has a
`DecodeHistory` for each loaded model, and a `TurnEnergy`. All are bounded.

Guards: tests/tui/metrics/test_figures.py recomputes the sums from the steps; tests/tui/test_charts.py has the history,
tests/tui/decode/test_machine.py the energy.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from headrace.runtime.metrics.cost import StepCost
from headrace.runtime.metrics.telemetry import StepRecord

if TYPE_CHECKING:  # the chat's first frame does not import sensors
    from headrace.runtime.machine.energy import EnergyUse

NOW_S = 1.0  # seconds of decode steps that current rates cover
_SAMPLE_S = 1.0  # of decoding, for one sample of the history
BUCKET = 64  # context tokens that count as the same
_RECENT = 30  # samples of the history
_MIN_STEPS = 8  # of an answer's last part, to be a sample too; tokens of a bucket: fewer are one slow step's
_IDLE_SAMPLES = 30  # latest samples of energy without steps; idle power is their least


class StepTotals(Struct):
    """Sums over the decode steps of one sequence, or of all sequences of a batch.

    The first step of an answer is left out, since its latency is not between tokens.
    """

    # With `whole_batch` a record adds 1 / batch size here, so that a pass counts once when all its records are added.
    steps: float = 0
    records: int = 0
    """Steps times sequences. The rows of a pass are more: draft tokens have rows of their own."""
    tokens: int = 0  # output tokens
    seconds: float = 0.0  # latency of the steps
    nbytes: float = 0  # weights and K/V; with `whole_batch` a pass counts its weights once
    flops: int = 0  # 0 if no cost was given to `add`
    proposed: int = 0
    accepted: int = 0

    def add(self, record: StepRecord, cost: StepCost | None = None, *, whole_batch: bool = False) -> None:
        """Add a sequence's record of a step.

        cost: for its FLOPs; None: leave them out.
        whole_batch: the totals are of all sequences, so this record counts as its share of the pass. Without it, the
            totals are of one sequence, which waits for the whole pass and all its weights.
        """
        if record.index == 0:
            return
        batch = 1
        if whole_batch:
            batch = max(1, record.batch)
        self.steps += 1 / batch
        self.records += 1
        self.tokens += record.tokens
        self.seconds += record.latency_s / batch
        self.nbytes += record.weight_bytes / batch + record.kv_bytes_read + record.kv_bytes_written
        self.proposed += record.proposed
        self.accepted += record.accepted
        if cost is not None:
            self.flops += flops_of(record, cost)

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.seconds if self.seconds > 0 else None

    @property
    def achieved_gb_s(self) -> float | None:
        return self.nbytes / self.seconds / 1e9 if self.seconds > 0 else None


def flops_of(step: StepRecord, cost: StepCost) -> int:
    """Return the FLOPs of a step: all its rows, rejected draft tokens included."""
    # `context` is counted after the step. It grew by one entry per output token: those of rejected tokens are dropped.
    return cost.step_flops(step.context - step.tokens, 1 + step.proposed)


def totals_of(steps: Sequence[StepRecord]) -> StepTotals:
    """Return the totals of these steps, without FLOPs."""
    totals = StepTotals()
    for record in steps:
        totals.add(record)
    return totals


def current_totals(steps: Sequence[StepRecord], cost: StepCost | None) -> StepTotals:
    """Return the totals of the latest steps that took NOW_S seconds together, of at least one step if there is one."""
    totals = StepTotals()
    for record in reversed(steps):
        totals.add(record, cost)
        if totals.seconds >= NOW_S:
            break
    return totals


class DecodeHistory:
    """Decode speed since the model was loaded, recent and by context length. Only seconds of decoding count.

    `add` takes steps, `end_turn` closes an answer. The chart of speed by context reads `speeds` and `token_gb_s`; the
    time until the context is full follows from the latter.
    """

    def __init__(self) -> None:
        self.samples: deque[float] = deque(maxlen=_RECENT)  # GB/s, times the tokens of a step
        self._by_context: dict[int, tuple[int, float]] = {}  # bucket: tokens, seconds
        self._begin_sample()

    def _begin_sample(self) -> None:
        """Set the sums of the next sample to 0."""
        self._tokens = 0
        self._steps = 0
        self._seconds = 0.0
        self._bytes = 0

    def add(self, records: Iterable[StepRecord]) -> None:
        """Add steps of an answer; its first, whose latency is not between tokens, is left out."""
        for record in records:
            if record.index == 0 or record.latency_s <= 0:
                continue
            bucket = record.context // BUCKET
            tokens, seconds = self._by_context.get(bucket, (0, 0.0))
            self._by_context[bucket] = tokens + record.tokens, seconds + record.latency_s
            self._tokens += record.tokens
            self._steps += 1
            self._seconds += record.latency_s
            self._bytes += record.step_bytes
            if self._seconds >= _SAMPLE_S:
                self._sample()

    def end_turn(self) -> None:
        """Close the answer; its last part becomes a sample if it is long enough."""
        if self._steps >= _MIN_STEPS:
            self._sample()
        self._begin_sample()

    def speeds(self) -> list[tuple[int, float]]:
        """Return (context tokens, tokens per second), the shortest context first; too few tokens are left out."""
        half = BUCKET // 2
        return [
            (bucket * BUCKET + half, tokens / seconds)
            for bucket, (tokens, seconds) in sorted(self._by_context.items())
            if tokens >= _MIN_STEPS
        ]

    @property
    def token_gb_s(self) -> float | None:
        """Recent bandwidth times tokens per step, in GB/s; None before the first sample.

        Tokens per second at a context length follow from this divided by the bytes of a step.
        """
        if not self.samples:
            return None
        return sum(self.samples) / len(self.samples)

    def _sample(self) -> None:
        """Append a sample of the steps since the last one."""
        self.samples.append(self._bytes / self._seconds / 1e9 * self._tokens / self._steps)
        self._begin_sample()


class TurnEnergy:
    """Energy per token of the latest turn, net of the machine's idle power, from samples of the machine's energy.

    Idle power is the least of recent samples without steps or prefill; `begin_turn` keeps it. A sample during which a
    prompt was computed does not count: its energy is not that of output tokens.
    """

    def __init__(self) -> None:
        self._idle: deque[float] = deque(maxlen=_IDLE_SAMPLES)  # watts
        self._net = 0.0  # joules of the turn
        self._tokens = 0

    def begin_turn(self) -> None:
        self._net = 0.0
        self._tokens = 0

    def add_sample(self, use: "EnergyUse | None", tokens: int, *, fed: bool) -> None:
        """Add a sample.

        use: energy since the last sample; None if the machine reports none.
        tokens: output tokens since then.
        fed: a prompt was computed since then.
        """
        if use is None or fed:
            return
        if not tokens:
            self._idle.append(use.watts)
        elif self.idle_watts is not None:
            self._net += use.joules - self.idle_watts * use.seconds
            self._tokens += tokens

    @property
    def idle_watts(self) -> float | None:
        return min(self._idle, default=None)

    @property
    def joules_per_token(self) -> float | None:
        """Net of idle power; None if unknown."""
        if not self._tokens or self._net <= 0:
            return None
        return self._net / self._tokens
