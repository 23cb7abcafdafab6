"""Step-cost model t = t0 + bytes / bandwidth, fitted to decode tests of different depths.

t0 is the fixed cost per step: dispatch, selection, synchronisation. Relative least squares, so that short steps count
as much as long ones. `fit_store.py` keeps a benchmark's fit for predictions.

Guard: tests/app/bench/measure/test_result.py.
"""

from collections.abc import Sequence

from msgspec import Struct

SPREAD = 1.15  # smallest ratio of most to fewest bytes that determines a line


class Point(Struct, frozen=True):
    """One decode test: bytes and seconds per step."""

    label: str
    nbytes: float
    seconds: float


class FittedPoint(Struct, frozen=True):
    """One decode test beside the line. residual: measured over fitted, less one."""

    label: str
    bytes: float
    ms: float
    residual: float


class StepCostFit(Struct, frozen=True, kw_only=True):
    """The fitted line: `step_cost` of the JSON document, see docs/bench-json.md.

    fixed_ms: t0.
    effective_bandwidth_gb_s: the slope's inverse.
    largest_residual: of the points, without its sign.
    """

    fixed_ms: float
    effective_bandwidth_gb_s: float
    largest_residual: float
    points: list[FittedPoint]
    notes: list[str] = []


def fit_step_cost(points: Sequence[Point]) -> StepCostFit | None:
    """Fit a line to the points; None if they are too few, too close or falling, or if the line begins below zero."""
    if len(points) < 2 or max(p.nbytes for p in points) < SPREAD * min(p.nbytes for p in points):
        return None
    # Weighted least squares of a line, seconds over bytes: with 1 / seconds**2, relative residuals are minimised.
    weights = [1 / p.seconds**2 for p in points]
    total = sum(weights)
    mean_b = sum(w * p.nbytes for w, p in zip(weights, points, strict=True)) / total
    mean_t = sum(w * p.seconds for w, p in zip(weights, points, strict=True)) / total
    covariance = sum(w * (p.nbytes - mean_b) * (p.seconds - mean_t) for w, p in zip(weights, points, strict=True))
    variance = sum(w * (p.nbytes - mean_b) ** 2 for w, p in zip(weights, points, strict=True))
    slope = covariance / variance
    fixed_s = mean_t - slope * mean_b
    if slope <= 0 or fixed_s < 0:  # by noise: no step costs less than nothing
        return None
    residuals = [p.seconds / (fixed_s + slope * p.nbytes) - 1 for p in points]
    return StepCostFit(
        fixed_ms=fixed_s * 1e3,
        effective_bandwidth_gb_s=1e-9 / slope,
        largest_residual=max(map(abs, residuals)),
        points=[FittedPoint(p.label, p.nbytes, p.seconds * 1e3, r) for p, r in zip(points, residuals, strict=True)],
    )
