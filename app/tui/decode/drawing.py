"""Drawing of charts: round ticks and their labels, braille dots (two wide and four high a cell), coloured layers.

Functions turn numbers into text, and a `Canvas` keeps the dots of a free drawing; neither needs a widget. The sections
with charts use them. Lines go from the top down, dots and values from the bottom up.

Guards: tests/tui/test_charts.py and test_parts.py.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby, pairwise
from operator import itemgetter

from textual.content import Content

_BLANK = 0x2800  # U+2800, the braille character without dots; the bits of its dots are added to it
_BIT = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # [row of the cell][column of the cell]
_LEFT_FILLED = (0, 0x40, 0x44, 0x46, 0x47)  # 0 to 4 dots lit from the bottom, of the left column of a cell
_RIGHT_FILLED = (0, 0x80, 0xA0, 0xB0, 0xB8)


def tick_step(span: float, max_ticks: int) -> float:
    """Return the least of 1, 2 and 5 times a power of ten that fits at most `max_ticks` times into `span`, above 0."""
    least = span / max_ticks
    size = 10.0 ** math.floor(math.log10(least))
    return next(factor * size for factor in (1, 2, 5, 10) if factor * size >= least * (1 - 1e-9))


def ticks(low: float, high: float, max_ticks: int) -> list[float]:
    """Return round values from `low` to `high`, both included: `max_ticks` and one more at most, none without span."""
    if max_ticks < 1 or not high > low or not math.isfinite(high - low):
        return []
    step = tick_step(high - low, max_ticks)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def even_ticks(high: float, rows: int, apart: int) -> tuple[float, list[tuple[int, float]]]:
    """Return the top of an axis from zero, and its ticks as (line, value): line 0 is the lowest, values are round.

    A tick stands exactly on a line, and all are equally many lines apart. So the top follows from the ticks, and need
    not be round.

    high: value that the axis has to reach; the top is not below it.
    rows: number of lines of the axis.
    apart: least number of lines from tick to tick.
    """
    if not (rows > apart and 0 < high < math.inf):  # no room for a second tick, or no values
        return high, [(0, 0.0)]
    # Each scale has a tick every `lines` lines, and values that differ by `step`. With `high` as the top, so many lines
    # would be worth `high * lines / rows`. `step` is the least round value not below that, so the top becomes
    # `step * rows / lines`. The scale with the lowest top leaves the least of the chart empty.
    scales = [(tick_step(high * lines / rows, 1), lines) for lines in range(apart, min(2 * apart + 1, rows - 1) + 1)]
    step, lines = min(scales, key=lambda scale: scale[0] * rows / scale[1])
    return step * rows / lines, [(line, line // lines * step) for line in range(0, rows, lines)]


def log_ticks(low: float, high: float, max_ticks: int) -> list[float]:
    """Return powers of ten from `low` to `high`, all or every n-th; 1, 2 and 5 times them if there is one at most."""
    if max_ticks < 1 or not 0 < low <= high:
        return []
    first = math.ceil(math.log10(low) - 1e-9)
    last = math.floor(math.log10(high) + 1e-9)
    if last <= first:
        near = (factor * 10.0**power for power in range(first - 1, last + 2) for factor in (1, 2, 5))
        return [value for value in near if low <= value <= high][:max_ticks]
    every = max(1, math.ceil((last - first + 1) / max_ticks))
    return [10.0**power for power in range(first, last + 1, every)]


def labels(values: Sequence[float]) -> list[str]:
    """Return the ticks in digits, all with as many decimals as their distance needs."""
    gaps = [b - a for a, b in pairwise(values) if b > a]
    if not gaps:  # a single label has the decimals of its value
        gaps = [abs(value) for value in values[:1] if value]
    decimals = max(0, -math.floor(math.log10(min(gaps, default=1.0)) + 1e-9))
    return [f"{value:,.{decimals}f}" for value in values]


def marked(marks: Sequence[tuple[int, str]], width: int) -> str:
    """Return a line below a chart: `╵` at each of the columns and a label right of it, left of it where the line ends.

    marks: (column, label) from the left. One that would run into the one before is left out.
    """
    line = ""
    for column, label in marks:
        start = column
        text = f"╵{label}"
        if column + len(text) > width:
            start = column - len(label)
            text = f"{label}╵"
        if 0 <= start < width and (start > len(line) or not line):
            line = line.ljust(start) + text
    return line.ljust(width)


def right_of_axis(names: Sequence[str], rows: Sequence[Content]) -> list[Content]:
    """Return the rows of a chart right of an axis with a tick at each name; "" is a row without a tick."""
    room = max(map(len, names))
    return [
        Content.assemble((f"{name:>{room}}{'┤' if name else '│'}", "$quiet"), row)
        for name, row in zip(names, rows, strict=True)
    ]


class Canvas:
    """Free drawing. `x` grows rightwards from 0 to 2 * width - 1, `y` upwards from 0 to 4 * height - 1."""

    def __init__(self, width: int, height: int) -> None:
        self.width = max(0, width)
        self.height = max(0, height)
        self._cells = [[0] * self.width for _ in range(self.height)]  # bits of the dots that are lit, top row first

    def dot(self, x: int, y: int) -> None:
        """Light one dot; outside the canvas nothing happens."""
        if 0 <= x < 2 * self.width and 0 <= y < 4 * self.height:
            down = 4 * self.height - 1 - y
            self._cells[down // 4][x // 2] |= _BIT[down % 4][x % 2]

    def line(self, x0: int, y0: int, x1: int, y1: int, every: int = 1) -> None:
        """Draw a straight line; `every` 2 lights each second dot (a dotted line)."""
        count = max(abs(x1 - x0), abs(y1 - y0), 1)
        for step in range(0, count + 1, every):
            self.dot(round(x0 + (x1 - x0) * step / count), round(y0 + (y1 - y0) * step / count))

    def rows(self) -> list[str]:
        """Return the lines of text, top first; an empty cell is a space."""
        return ["".join(_cell_text(dots) for dots in row) for row in self._cells]


def _dots(cell: str) -> int:
    """Return the bits of the dots of a cell; 0 for a character that is not braille."""
    return ord(cell) - _BLANK if _is_braille(cell) else 0


def _is_braille(cell: str) -> bool:
    return _BLANK <= ord(cell) < _BLANK + 256


def _cell_text(dots: int) -> str:
    """Return the character of a cell; a space without dots."""
    return chr(_BLANK + dots) if dots else " "


def bars(values: Sequence[float], top: float, width: int, height: int) -> list[str]:
    """Return filled columns on a zero baseline, the last value rightmost, two values a cell; `top`: the full height.

    A value above `top` is cut there; a value above zero shows at least one dot. There are `height` lines, top first.
    """
    shown = list(values[-2 * width :])
    dots = [0] * (2 * width - len(shown)) + [dots_of(value, top, height) for value in shown]
    columns = [_column(left, right, height) for left, right in zip(dots[::2], dots[1::2], strict=True)]
    return ["".join(row) for row in zip(*columns, strict=True)]


def dotted(rows: Sequence[str], height: int, every: int) -> list[str]:
    """Draw a level dotted line through a drawing, `height` dots above its lowest; it inverts the dots it crosses.

    rows: lines of the drawing, top first.
    every: 2 or 4, the distance of the dots.
    """
    line = len(rows) - 1 - height // 4
    if not 0 <= line < len(rows):
        return list(rows)
    bit = _BIT[3 - height % 4][0]
    cells = list(rows[line])
    for index in range(0, len(cells), every // 2):
        cells[index] = _cell_text(_dots(cells[index]) ^ bit)
    return [*rows[:line], "".join(cells), *rows[line + 1 :]]


@lru_cache(maxsize=4096)
def _column(left: int, right: int, height: int) -> str:
    """Return one cell column, top first, filled to a height in dots; an empty cell is a space."""
    cells = []
    for floor in range(4 * (height - 1), -1, -4):
        left_dots = _LEFT_FILLED[min(4, max(0, left - floor))]
        right_dots = _RIGHT_FILLED[min(4, max(0, right - floor))]
        cells.append(_cell_text(left_dots | right_dots))
    return "".join(cells)


def dots_of(value: float, top: float, height: int) -> int:
    """Return the height of a value in dots, in a chart of `height` lines."""
    if value <= 0 or top <= 0:
        return 0
    return min(4 * height, max(1, round(value / top * 4 * height)))


def layered(layers: Sequence[tuple[Sequence[str], str]]) -> list[Content]:
    """Draw layers, (rows, style) each with the front one last, over each other.

    Braille cells combine their dots in the front layer's style. Any other character covers the cell.
    """
    styles = [style for _, style in layers]
    return [_line(texts, styles) for texts in zip(*(rows for rows, _ in layers), strict=True)]


def _line(texts: Sequence[str], styles: Sequence[str]) -> Content:
    """Return one row: `texts` of the layers over each other."""
    drawn = [(text, style) for text, style in zip(texts, styles, strict=True) if not text.isspace()]
    if not drawn:
        return Content(texts[0])
    if len(drawn) == 1:  # nearly always
        return Content.styled(*drawn[0])
    cells = [_cell([(text[at], style) for text, style in drawn]) for at in range(len(texts[0]))]
    runs = groupby(cells, key=itemgetter(1))
    return Content.assemble(*(("".join(text for text, _ in run), style) for style, run in runs))


def _cell(stack: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """Combine one cell of all layers."""
    shown = [(text, style) for text, style in stack if text != " "]
    if not shown:
        return " ", ""
    text, style = shown[-1]
    if not _is_braille(text):
        return text, style
    dots = 0
    for other, _ in shown:
        dots |= _dots(other)
    return _cell_text(dots), style
