"""Chart axes: round tick values and their labels. No drawing."""

import math
from collections.abc import Sequence
from itertools import pairwise


def tick_step(span: float, most: int) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that fits at most `most` times into `span`; both above zero."""
    least = span / most
    size = 10.0 ** math.floor(math.log10(least))
    return next(factor * size for factor in (1, 2, 5, 10) if factor * size >= least * (1 - 1e-9))


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round values from `low` to `high`, both included: at most `most` and one more, none where there is no span."""
    if most < 1 or not high > low or not math.isfinite(high - low):
        return []
    step = tick_step(high - low, most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [place * step for place in range(first, last + 1)]


def even_ticks(high: float, rows: int, apart: int) -> tuple[float, list[tuple[int, float]]]:
    """Return the top of an axis from zero over `rows` lines, and its ticks: (line, from the lowest up; round value).

    The top is at least `high`, and such that ticks are equally many lines apart, at least `apart`.
    """
    if not (rows > apart and 0 < high < math.inf):
        return high, [(0, 0.0)]
    scales = [(tick_step(high * lines / rows, 1), lines) for lines in range(apart, min(2 * apart + 1, rows - 1) + 1)]
    step, lines = min(scales, key=lambda scale: scale[0] * rows / scale[1])
    return step * rows / lines, [(line, line // lines * step) for line in range(0, rows, lines)]


def decades(low: float, high: float, most: int) -> list[float]:
    """Powers of ten from `low` to `high`, every one or, where those are too many, every second, third ..."""
    if most < 1 or not 0 < low <= high:
        return []
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    every = max(1, math.ceil((last - first + 1) / most))
    return [10.0**power for power in range(first, last + 1, every)]


def labels(values: Sequence[float]) -> list[str]:
    """The ticks in digits, all with as many decimals as their distance needs."""
    gaps = [b - a for a, b in pairwise(values) if b > a]
    step = min(gaps, default=abs(values[0]) if values and values[0] else 1.0)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{value:,.{decimals}f}" for value in values]


def marked(places: Sequence[tuple[int, str]], width: int) -> str:
    """A line below a chart: `╵` at each of the columns and a label right of it, left of it where the line ends.

    places: (column, label) from the left. One that would run into the one before is left out.
    """
    line = ""
    for column, label in places:
        fits = column + 1 + len(label) <= width
        start = column if fits else column - len(label)
        if 0 <= start < width and (start > len(line) or not line):
            line = f"{line:<{start}}" + (f"╵{label}" if fits else f"{label}╵")
    return f"{line:<{width}}"
