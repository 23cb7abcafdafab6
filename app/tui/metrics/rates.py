"""Totals and rates of decode steps.

The sums behind every speed, bandwidth and acceptance rate of the decode view: a figure is a property of `StepTotals`,
over a second, a turn or a batch. tests/tui/metrics/test_figures.py recomputes them from the steps.
"""

from collections.abc import Sequence

from msgspec import Struct

from headrace.runtime.metrics.cost import StepCost
from headrace.runtime.metrics.telemetry import StepRecord

NOW_S = 1.0  # seconds of decode steps that current rates cover


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
