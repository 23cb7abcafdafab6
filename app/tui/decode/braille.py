"""Drawing with braille dots: every cell is 2 dots wide and 4 high. Plain strings, no colours, no terminal."""

from collections.abc import Sequence
from functools import lru_cache

_BLANK = 0x2800
_BIT = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # [row of the cell][column of the cell]
_FILLED = (  # dots lit from the bottom: [left column 0..4][right column 0..4]
    tuple(tuple(_BLANK + left + right for right in (0, 0x80, 0xA0, 0xB0, 0xB8)) for left in (0, 0x40, 0x44, 0x46, 0x47))
)


class Canvas:
    """Free drawing. `x` grows rightwards from 0 to 2 * width - 1, `y` upwards from 0 to 4 * height - 1."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = max(0, width), max(0, height)
        self._cells = [[0] * self.width for _ in range(self.height)]

    def dot(self, x: int, y: int) -> None:
        """Light one dot; outside the canvas nothing happens."""
        if 0 <= x < 2 * self.width and 0 <= y < 4 * self.height:
            down = 4 * self.height - 1 - y
            self._cells[down // 4][x // 2] |= _BIT[down % 4][x % 2]

    def line(self, x0: int, y0: int, x1: int, y1: int, every: int = 1) -> None:
        """A straight line; `every` 2 lights each second dot (a dotted line)."""
        count = max(abs(x1 - x0), abs(y1 - y0), 1)
        for step in range(0, count + 1, every):
            self.dot(round(x0 + (x1 - x0) * step / count), round(y0 + (y1 - y0) * step / count))

    def rows(self) -> list[str]:
        """The lines of text, top first; an empty cell is a space."""
        return ["".join(chr(_BLANK + cell) if cell else " " for cell in row) for row in self._cells]


def bars(values: Sequence[float], top: float, width: int, height: int) -> list[str]:
    """Filled columns on a zero baseline, the last value rightmost, two values a cell; `top` is the full height.

    A value above `top` is cut there; a value above zero shows at least one dot. Returns `height` lines, top first.
    """
    shown = list(values[-2 * width :])
    dots = [0] * (2 * width - len(shown)) + [dots_of(value, top, height) for value in shown]
    columns = [_column(left, right, height) for left, right in zip(dots[::2], dots[1::2], strict=True)]
    return ["".join(row) for row in zip(*columns, strict=True)]


def dotted(rows: Sequence[str], height: int, every: int) -> list[str]:
    """Draw a level dotted line through a drawing, `height` dots above its lowest; it inverts the dots it crosses.

    rows: lines of the drawing, top first. every: 2 or 4, the distance of the dots.
    """
    line = len(rows) - 1 - height // 4
    if not 0 <= line < len(rows):
        return list(rows)
    bit = _BIT[3 - height % 4][0]
    turned = (
        chr((ord(cell) if cell != " " else _BLANK) ^ (bit if place % (every // 2) == 0 else 0))
        for place, cell in enumerate(rows[line])
    )
    return [*rows[:line], "".join(turned).replace(chr(_BLANK), " "), *rows[line + 1 :]]


@lru_cache(maxsize=4096)
def _column(left: int, right: int, height: int) -> str:
    """Return one cell column, top first, filled to a height in dots; an empty cell is a space."""
    cells = []
    for floor in range(4 * (height - 1), -1, -4):
        lights = min(4, max(0, left - floor)), min(4, max(0, right - floor))
        cells.append(chr(_FILLED[lights[0]][lights[1]]) if any(lights) else " ")
    return "".join(cells)


def dots_of(value: float, top: float, height: int) -> int:
    """Return the height of a value in dots, in a chart of `height` lines."""
    if value <= 0 or top <= 0:
        return 0
    return min(4 * height, max(1, round(value / top * 4 * height)))
