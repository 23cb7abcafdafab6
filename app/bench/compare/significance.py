"""Significance of a difference in speed between two runs, given the memory speed at each repetition.

An analysis of covariance on logarithms: log(speed) = run + slope * log(memory speed) + noise. Both runs share the
slope, between 0 (not bound by memory) and 1 (bound by memory alone); this removes the machine's drift. Without memory
speeds it is the two-sample t test. Slow noise makes neighbouring repetitions alike, so the error is widened by the
first autocorrelation of the residuals. Sources: Cox and McCullagh, "Some aspects of analysis of covariance",
Biometrics 38(3), 1982; Bayley and Hammersley, "The effective number of independent observations in an autocorrelated
time series", JRSS Supplement 8(2), 1946.

Guards: tests/app/bench/test_stats.py and tests/app/bench/compare/test_documents.py.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

from msgspec import Struct

from headrace.app.bench.stats import student_cdf, student_quantile

Pairs = Sequence[tuple[float, float | None]]
"""(speed, memory speed around it)"""

_MAX_MARGIN = 300.0  # in logarithms, so that it has an exponential


class Difference(Struct, frozen=True):
    """Speeds of run B over those of run A.

    ratio: at equal memory speed.
    low, high: its 95 % interval.
    p: two-sided, of a ratio of 1.
    slope: part of a change in memory speed that the speeds follow, 0 to 1.
    """

    ratio: float
    low: float
    high: float
    p: float
    slope: float


def difference(a: Pairs, b: Pairs) -> Difference | None:
    """Compare two samples. None for fewer than two repetitions on a side."""
    if len(a) < 2 or len(b) < 2:
        return None
    # y: logarithms of speeds; x: of memory speeds
    ya = [math.log(speed) for speed, _ in a]
    yb = [math.log(speed) for speed, _ in b]
    xa = _centred_memory(a, (*a, *b))
    xb = _centred_memory(b, (*a, *b))
    # Sums of squares and products, within the runs
    sxx = _products(xa, xa) + _products(xb, xb)
    sxy = _products(xa, ya) + _products(xb, yb)
    syy = _products(ya, ya) + _products(yb, yb)
    memory_shift = fmean(xb) - fmean(xa)
    slope = 0.0
    df = len(a) + len(b) - 2
    relative_variance = 1 / len(a) + 1 / len(b)  # variance of the shift over that of one repetition
    if sxx > 0:  # memory speeds differ, and the slope takes one degree of freedom
        slope = min(1.0, max(0.0, sxy / sxx))
        df -= 1
        relative_variance += memory_shift * memory_shift / sxx
    df = max(df, 1)
    shift = fmean(yb) - fmean(ya) - slope * memory_shift
    squared_residuals = max(0.0, syy - 2 * slope * sxy + slope * slope * sxx)
    variance = squared_residuals / df * _inflation([_residuals(xa, ya, slope), _residuals(xb, yb, slope)])
    error = math.sqrt(variance * relative_variance)
    if error == 0:
        margin = 0.0
        p = 1.0 if shift == 0 else 0.0
    else:
        margin = min(_MAX_MARGIN, student_quantile(0.975, df) * error)
        p = 2 * (1 - student_cdf(abs(shift) / error, df))
    return Difference(math.exp(shift), math.exp(shift - margin), math.exp(shift + margin), p, slope)


def _residuals(x: Sequence[float], y: Sequence[float], slope: float) -> list[float]:
    """Return a side's residuals in the order of measurement."""
    mean_x = fmean(x)
    mean_y = fmean(y)
    return [v - mean_y - slope * (u - mean_x) for u, v in zip(x, y, strict=True)]


def _inflation(sides: Sequence[Sequence[float]]) -> float:
    """Return the variance inflation of a mean by autocorrelation r: (1 + r) / (1 - r), at least 1.

    r is corrected for its bias in short series (Kendall, 1954). It counts as at most 0.9, an inflation of 19: towards 1
    it would grow without bound, by a coefficient that a short series cannot tell so exactly.
    """
    squares = sum(residual * residual for side in sides for residual in side)
    if squares == 0:
        return 1.0
    biased = sum(first * second for side in sides for first, second in pairwise(side)) / squares
    mean_count = sum(map(len, sides)) / len(sides)
    r = min(0.9, max(0.0, biased + (1 + 3 * biased) / mean_count))
    return (1 + r) / (1 - r)


def holm(p_values: Sequence[float]) -> list[bool]:
    """Return which tests are significant with a family-wise error of at most 5 % (Holm, 1979)."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    significant = [False] * len(p_values)
    for rank, i in enumerate(order):
        if p_values[i] > 0.05 / (len(p_values) - rank):
            break
        significant[i] = True
    return significant


def _centred_memory(side: Pairs, both: Pairs) -> list[float]:
    """Return log memory speeds less their overall mean; zeros if any is unknown."""
    known = [math.log(memory) for _, memory in both if memory]
    if len(known) < len(both):
        return [0.0] * len(side)
    middle = fmean(known)
    return [math.log(memory) - middle for _, memory in side if memory]


def _products(u: Sequence[float], v: Sequence[float]) -> float:
    """Return the sum of products of deviations from the means."""
    mean_u = fmean(u)
    mean_v = fmean(v)
    return sum((x - mean_u) * (y - mean_v) for x, y in zip(u, v, strict=True))
