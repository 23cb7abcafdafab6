"""Step-cost model t = t0 + bytes / bandwidth, fitted to decode tests of different depths.

t0 is the fixed cost per step: dispatch, selection, synchronisation. Relative least squares, so that short steps count
as much as long ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SPREAD = 1.15  # smallest ratio of most to fewest bytes that determines a line


@dataclass(frozen=True, slots=True)
class Point:
    """One decode test: bytes and seconds per step."""

    label: str
    nbytes: float
    seconds: float


@dataclass(frozen=True, slots=True)
class StepCostFit:
    """A fitted line. A negative `fixed_s` contradicts the model; `document` reports that."""

    fixed_s: float
    bytes_per_second: float
    points: Sequence[Point]

    def seconds(self, nbytes: float) -> float:
        """Return the time of a step that moves `nbytes`."""
        return self.fixed_s + nbytes / self.bytes_per_second

    def residual(self, point: Point) -> float:
        """Return measured over fitted, less one."""
        return point.seconds / self.seconds(point.nbytes) - 1

    def document(self) -> dict[str, object]:
        """Return the fit as in the JSON document."""
        notes = []
        if self.fixed_s < 0:
            notes.append("a negative fixed cost: more than the bytes differs between the steps")
        return {
            "fixed_ms": self.fixed_s * 1e3,
            "effective_bandwidth_gb_s": self.bytes_per_second / 1e9,
            "largest_residual": max(abs(self.residual(point)) for point in self.points),
            "points": [
                {"label": p.label, "bytes": p.nbytes, "ms": p.seconds * 1e3, "residual": self.residual(p)}
                for p in self.points
            ],
            "notes": notes,
        }


def fit_step_cost(points: Sequence[Point]) -> StepCostFit | None:
    """Fit a line to the points; None if they are too few, too close or falling."""
    if len(points) < 2 or max(p.nbytes for p in points) < SPREAD * min(p.nbytes for p in points):
        return None
    weights = [1 / p.seconds**2 for p in points]
    total = sum(weights)
    mean_b = sum(w * p.nbytes for w, p in zip(weights, points, strict=True)) / total
    mean_t = sum(w * p.seconds for w, p in zip(weights, points, strict=True)) / total
    covariance = sum(w * (p.nbytes - mean_b) * (p.seconds - mean_t) for w, p in zip(weights, points, strict=True))
    variance = sum(w * (p.nbytes - mean_b) ** 2 for w, p in zip(weights, points, strict=True))
    slope = covariance / variance
    return StepCostFit(mean_t - slope * mean_b, 1 / slope, list(points)) if slope > 0 else None


def points_of(results: Sequence[dict[str, Any]], engine: str) -> list[Point]:
    """Return one engine's decode tests by their median step, which is robust to stalls."""
    return [
        Point(
            f"{entry['model']} {entry['test']} @ d{entry['depth']}",
            entry["weight_bytes_per_step"] + entry["kv_bytes_per_step"],
            entry["itl_ms"]["p50"] / 1e3,
        )
        for entry in results
        if entry["engine"] == engine
        and not entry["prompt_tokens"]
        and entry["kv_bytes_per_step"] is not None
        and entry.get("batch", 1) == 1  # a batch's step may be bound by arithmetic
    ]
