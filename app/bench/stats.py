"""Statistics for few repetitions: spread, bootstrap intervals, Student's t. Plain Python, fixed seed.

Free of numpy and scipy: their imports take longer than these computations. The fixed seed makes an interval a function
of its values: a document shows the same figures every time.

Guard: tests/app/bench/test_stats.py compares with known values.
"""

import math
import random
from collections.abc import Callable, Sequence
from functools import cache
from statistics import NormalDist, fmean
from typing import TypeVar

from msgspec import Struct

from headrace.runtime.metrics.telemetry import quantile

Bounds = tuple[float, float] | tuple[None, None]
"""Low and high of a 95 % interval; None for fewer than two values, which have no spread."""


class Figure(Struct, frozen=True):
    """A figure with its 95 % interval; no interval for fewer than two values."""

    value: float
    low: float | None
    high: float | None


_T = TypeVar("_T")

RESAMPLES = 2000  # the ends of a 95 % interval are then the 50th values or so from either side
SEED = 20_251_120  # any number
CONFIDENCE = 0.95


def sd(values: Sequence[float]) -> float:
    """Return the sample standard deviation; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    mean = fmean(values)  # statistics.mean computes in fractions, too slow for hundreds of calls
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def bootstrap(units: Sequence[_T], statistic: Callable[[Sequence[_T]], float], *, resamples: int = RESAMPLES) -> Bounds:
    """Return a deterministic bootstrap interval of a statistic; units are drawn whole. None for fewer than two units.

    The expanded percentile interval: percentiles are widened to correct for a small sample (Hesterberg, "What Teachers
    Should Know About the Bootstrap", The American Statistician 69(4), 2015).
    """
    count = len(units)
    if count < 2:
        return None, None
    draw = random.Random(SEED)
    statistics = sorted(statistic(draw.choices(units, k=count)) for _ in range(resamples))
    widened = math.sqrt(count / (count - 1)) * student_quantile((1 + CONFIDENCE) / 2, count - 1)
    tail = NormalDist().cdf(-widened)
    return quantile(statistics, tail), quantile(statistics, 1 - tail)


def geometric_ratio(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, Bounds]:
    """Return the geometric mean of paired ours / theirs and its bootstrap interval."""
    logs = [math.log(a / b) for a, b in zip(ours, theirs, strict=True)]
    ratio = math.exp(fmean(logs))
    low, high = bootstrap(logs, fmean)
    if low is None or high is None:
        return ratio, (None, None)
    return ratio, (math.exp(low), math.exp(high))


def student_cdf(t: float, df: int) -> float:
    """Return P(T <= t) for Student's t with integer degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan2(t, math.sqrt(df))
    cosine = math.cos(angle)
    sine = math.sin(angle)
    # Series in powers of the cosine: odd ones for an odd df, even ones, from 1 on, for an even df.
    is_odd = df % 2 == 1
    term = cosine if is_odd else 1.0
    total = 0.0
    if df > 1:
        total = term
    for k in range(3 if is_odd else 2, df - 1, 2):
        term *= (k - 1) / k * cosine * cosine
        total += term
    inside = sine * total  # P(-t < T < t)
    if is_odd:
        inside = 2 / math.pi * (angle + sine * total)
    return (1 + inside) / 2


@cache
def student_quantile(p: float, df: int) -> float:
    """Return the t with student_cdf(t, df) = p, for p >= 0.5."""
    high = 1.0
    while student_cdf(high, df) < p:
        high *= 2
    return crossing(lambda t: student_cdf(t, df) < p, high)


def crossing(is_below: Callable[[float], bool], high: float) -> float:
    """Return the x between 0 and `high` up to which `is_below` is True, by halving the interval."""
    low = 0.0
    for _ in range(60):  # more bits than a float has
        middle = (low + high) / 2
        if is_below(middle):
            low = middle
        else:
            high = middle
    return (low + high) / 2
