"""Roofline plot: FLOP/s over arithmetic intensity, with points for decode and prefill.

After Williams, Waterman and Patterson, "Roofline" (CACM 2009). The slope is the measured memory bandwidth. The roof is
the measured compute peak, else the vendor's half-precision peak from the chip table; without either there is none.
Points are computed from shapes and times.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from textual.content import Content

from headrace.app.tui.decode.axes import decades, marked
from headrace.app.tui.decode.braille import Canvas
from headrace.app.tui.decode.layers import layered
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.widgets.lines import Section

_ROOMY = 52  # cells from which the legend says the intensities too
_MARGIN = 10**0.4  # factor around the points
_ROWS_A_TICK, _CELLS_A_TICK = 2, 8


@dataclass(frozen=True, slots=True)
class Point:
    """A place on the plot: FLOP per byte, FLOP per second, and how it is drawn."""

    intensity: float
    flops: float
    mark: str
    style: str


class RooflineSection(Section):
    """Decode and prefill under the machine's limits."""

    TITLE = "roofline, FLOP/s (computed)"

    def lines(self, metrics: LiveMetrics, width: int, height: int) -> Sequence[Content]:
        points = [point for point in (decode_point(metrics), prefill_point(metrics)) if point]
        bandwidth = metrics.machine.measured_gb_s
        if bandwidth is None or not points or height < 4 or width < 16:
            return [Content.styled("after the first answer", "$faint")]
        self.set_subtitle(_source(metrics))
        return [*plot(points, bandwidth * 1e9, roof(metrics, points), width, height - 1), *_legend(points, width)]


def decode_point(metrics: LiveMetrics) -> Point | None:
    """Return the point of the last second of decoding; after a turn, of the turn."""
    flops, achieved = metrics.flops, metrics.achieved_gb_s
    if not flops or not achieved:
        return None
    return Point(flops / (achieved * 1e9), flops, "◆", "bold $text-accent")


def prefill_point(metrics: LiveMetrics) -> Point | None:
    """Return the point of the latest prefill long enough to measure."""
    prefill = metrics.prefill
    if prefill is None or not prefill.flops or not prefill.nbytes:
        return None
    return Point(prefill.flops / prefill.nbytes, prefill.flops / prefill.seconds, "▲", "bold $text-success")


def roof(metrics: LiveMetrics, points: Sequence[Point]) -> float | None:
    """Return the compute limit in FLOP/s: measured or reached, whichever is more, else the vendor's."""
    machine = metrics.machine
    if machine.compute_flops:
        return max(machine.compute_flops, *(point.flops for point in points))
    return machine.peak_flops


def plot(points: Sequence[Point], bandwidth: float, roof: float | None, width: int, height: int) -> list[Content]:
    """`height` lines of `width` cells. bandwidth: bytes per second. roof: FLOP per second."""
    rows = height - 1
    knee = roof / bandwidth if roof else None
    across = [point.intensity for point in points] + ([knee] if knee else [])
    low_x, high_x = min(across) / _MARGIN, max(across) * _MARGIN
    end = min(knee or high_x, high_x)  # of the slope
    up = [point.flops for point in points] + [bandwidth * low_x, bandwidth * end]
    low_y, high_y = min(up), max(up) * _MARGIN**0.5
    places = decades(low_y, high_y, max(1, rows // _ROWS_A_TICK))
    names = [""] * rows
    for value in places:
        names[_row(value, low_y, high_y, rows)] = _flops(value)
    left = max(len(name) for name in [*names, ""]) + 1
    room = width - left
    canvas = Canvas(room, rows)
    last_x, last_y = 2 * room - 1, 4 * rows - 1

    def x_of(value: float) -> int:
        return round(_share(value, low_x, high_x) * last_x)

    def y_of(value: float) -> int:
        return round(_share(value, low_y, high_y) * last_y)

    canvas.line(0, y_of(bandwidth * low_x), x_of(end), y_of(bandwidth * end))
    if roof:
        canvas.line(x_of(end), y_of(roof), last_x, y_of(roof))
    layers = [(canvas.rows(), "$text-warning")]
    for point in points:
        row, column = _row(point.flops, low_y, high_y, rows), x_of(point.intensity) // 2
        blank = " " * room
        drawn = [blank[:column] + point.mark + blank[column + 1 :] if at == row else blank for at in range(rows)]
        layers.append((drawn, point.style))
    lines = [
        Content.assemble((f"{name:>{left - 1}}{'┤' if name else '│'}", "$quiet"), line)
        for name, line in zip(names, layered(layers), strict=True)
    ]
    marks = [(x_of(value) // 2, f"{value:g}") for value in decades(low_x, high_x, max(1, room // _CELLS_A_TICK))]
    axis = marked(marks, room)
    unit = " FLOP/byte"
    if axis.endswith(" " * (len(unit) + 1)):
        axis = axis[: -len(unit)] + unit
    return [*lines, Content.styled(" " * left + axis, "$quiet")]


def _source(metrics: LiveMetrics) -> str:
    if metrics.machine.compute_flops:
        return ""
    return "compute roof: the vendor's" if metrics.machine.peak_flops else "compute roof not measured yet"


def _share(value: float, low: float, high: float) -> float:
    return math.log(value / low) / math.log(high / low)


def _row(value: float, low: float, high: float, rows: int) -> int:
    dot = round(_share(value, low, high) * (4 * rows - 1))
    return rows - 1 - min(4 * rows - 1, max(0, dot)) // 4


def _legend(points: Sequence[Point], width: int) -> list[Content]:
    names = {"◆": "decode", "▲": "prefill"}
    pieces: list[Content] = []
    for point in points:
        intensity = f" {_intensity(point.intensity)} FLOP/B" if width >= _ROOMY else ""
        text = f" {names[point.mark]}{intensity} {_flops(point.flops)}  "
        pieces.append(Content.assemble((point.mark, point.style), (text, "$quiet")))
    return [Content.assemble(*pieces).truncate(width)]


def _flops(value: float) -> str:
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= size * (1 - 1e-9):
            return f"{value / size:.3g}{unit}"
    return f"{value:.2g}"


def _intensity(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"
