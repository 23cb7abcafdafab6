"""Current decode rates, computed from the latest steps."""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.runtime.metrics.cost import StepCost
from headrace.runtime.metrics.telemetry import StepRecord

NOW_S = 1.0  # the span of current rates


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens, bytes and FLOPs per second; None if unknown."""

    now: float | None = None
    achieved_gb_s: float | None = None
    flops: float | None = None


def flops_of(step: StepRecord, cost: StepCost) -> int:
    """Return the FLOPs of a step: all its rows, rejected draft tokens included."""
    return cost.step_flops(step.context - step.tokens, 1 + step.proposed)


def current_rates(steps: Sequence[StepRecord], cost: StepCost | None) -> Rates:
    """Return the rates over the last NOW_S seconds, at least one step."""
    recent: list[StepRecord] = []
    span = 0.0
    for record in reversed(steps):
        recent.append(record)
        span += record.latency_s
        if span >= NOW_S:
            break
    return Rates(
        now=_rate([record for record in recent if record.index > 0]),
        achieved_gb_s=sum(record.step_bytes for record in recent) / span / 1e9 if span > 0 else None,
        flops=sum(flops_of(record, cost) for record in recent) / span if span > 0 and cost else None,
    )


def _rate(steps: list[StepRecord]) -> float | None:
    seconds = sum(record.latency_s for record in steps)
    return sum(record.tokens for record in steps) / seconds if seconds > 0 else None


def moving_share(steps: Sequence[StepRecord]) -> float | None:
    """Return the K/V part of the last step's bytes, 0 to 1."""
    if not steps or not steps[-1].step_bytes:
        return None
    last = steps[-1]
    return (last.kv_bytes_read + last.kv_bytes_written) / last.step_bytes
