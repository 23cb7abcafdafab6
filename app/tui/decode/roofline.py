"""Roofline plot: decode and prefill under the machine's limits, log-log, with the trail of the turn.

After Williams, Waterman and Patterson, "Roofline" (CACM 2009). The slopes are the measured and the nominal memory
bandwidth. The roof is the measured compute peak, else the vendor's half-precision peak from the chip table; without
either there is none. Points are computed from shapes and times.

`plot` draws points and roofs (`app.tui.metrics.figures`) without a widget.
tests/tui/test_charts.py guards this.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from msgspec import Struct
from textual.content import Content

from headrace.app.tui.decode.drawing import Canvas, layered, log_ticks, marked, right_of_axis
from headrace.app.tui.metrics.figures import RooflinePoint, Roofs, decode_point, prefill_point, roofs
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.widgets.lines import Section, first_that_fits, fitting
from headrace.runtime.metrics.units import format_rate

_MARGIN = 10**0.4  # factor around the points; its root above the roofs, where nothing is drawn
_EXPLAINED = 10  # lines from which one says which roof limits the point
_ROWS_A_TICK = 2  # lines from tick to tick, at least
_CELLS_A_TICK = 8  # cells from tick to tick, about


class RooflineSection(Section):
    """The point of now, its trail, the latest prefill and the roofs."""

    TITLE = "roofline, FLOP/s (computed)"
    NAME = "roofline"
    MIN_LINES = 7
    MAX_LINES = 60
    IS_CHART = True

    def lines(self, metrics: LiveMetrics, width: int, height: int) -> Sequence[Content]:
        now = decode_point(metrics.totals)
        prefill = prefill_point(metrics.prefill)
        limits = roofs(metrics.limits)
        marks = [(point, mark) for point, mark in ((now, _NOW), (prefill, _PREFILL)) if point is not None]
        if not marks:
            return [Content.styled("after the first answer", "$faint")]
        if limits.memory is None:
            return [Content.styled("memory bandwidth not measured yet", "$faint").truncate(width, ellipsis=True)]
        if height < 4 or width < 16:
            return [Content.styled("no room here", "$faint").truncate(width, ellipsis=True)]

        # The lines below the plot: the roof over the present point, the legend.
        why = limits.why_above(now) if now is not None else ""
        self.set_subtitle(why or _source(limits), warns=bool(why))
        first, *others = [
            Content.assemble((mark.sign, mark.style), (f" {mark.name} {flops_text(point.flops)}", "$quiet"))
            for point, mark in marks
        ]
        roof_text = f"╱ memory {format_rate(limits.memory)}"
        if limits.nominal:
            roof_text += "  ┈ nominal"
        legend = [first, Content.styled(roof_text, "$text-warning"), *others]
        texts = [fitting(legend, width)]
        if now is not None and height >= _EXPLAINED and not why:
            full = limits.limit_of(now)
            text = first_that_fits((full, full.partition(";")[0]), width - 2)
            texts.insert(0, Content.assemble((_NOW.sign, _NOW.style), f" {text}").truncate(width))

        drawn = plot(
            [(point, mark.sign, mark.style) for point, mark in marks],
            metrics.trail.points,
            limits,
            width,
            height - len(texts),
        )
        return [*drawn, *texts]


class _PointStyle(NamedTuple):
    """The look of a point.

    sign: a character.
    style: its colour.
    name: in the legend.
    """

    sign: str
    style: str
    name: str


_NOW = _PointStyle("◆", "bold $text-accent", "decode")
_PREFILL = _PointStyle("▲", "bold $text-success", "prefill")


class _RooflineAxes(Struct, frozen=True):
    """Logarithmic axes.

    low_x, high_x: FLOP per byte at the left and the right end.
    low_y, high_y: FLOP per second at the lower and the upper end.
    width, height: cells and lines.
    """

    low_x: float
    high_x: float
    low_y: float
    high_y: float
    width: int
    height: int

    def x(self, value: float) -> int:
        """Return the dot of an intensity."""
        return round(math.log(value / self.low_x) / math.log(self.high_x / self.low_x) * (2 * self.width - 1))

    def y(self, value: float) -> int:
        """Return the dot of a speed."""
        return round(math.log(value / self.low_y) / math.log(self.high_y / self.low_y) * (4 * self.height - 1))

    def row(self, value: float) -> int:
        return self.height - 1 - min(4 * self.height - 1, max(0, self.y(value))) // 4

    def column(self, value: float) -> int:
        return min(self.width - 1, max(0, self.x(value) // 2))


def plot(
    marks: Sequence[tuple[RooflinePoint, str, str]],
    trail: Sequence[RooflinePoint],
    limits: Roofs,
    width: int,
    height: int,
) -> list[Content]:
    """Return the lines of the plot.

    marks: (point, character, style), at least one.
    trail: earlier points, the oldest first.
    limits: with a memory bandwidth.
    width, height: cells and lines.
    """
    assert limits.memory is not None
    rows = height - 1
    memory = limits.memory
    # The ranges of both axes, from the points, and the corner of the roofs.
    points = [*(point for point, _, _ in marks), *trail]
    intensities = [point.intensity for point in points]
    top = None  # FLOP/s of the compute roof, which is not drawn below a point
    if limits.compute:
        top = max(limits.compute, *(point.flops for point, _, _ in marks))
        intensities.append(top / memory)  # where the slope meets the compute roof
    low_x = min(intensities) / _MARGIN
    high_x = max(intensities) * _MARGIN
    slope_end = top / memory if top else high_x
    speeds = [*(point.flops for point in points), memory * low_x, memory * slope_end]
    low_y = min(speeds)
    high_y = max(speeds) * _MARGIN**0.5
    # The labels at the left decide how much room is left for the plot. Their rows are the same in any width.
    scale = _RooflineAxes(low_x, high_x, low_y, high_y, 1, rows)
    names = [""] * rows
    for value in log_ticks(low_y, high_y, max(1, rows // _ROWS_A_TICK)):
        names[scale.row(value)] = flops_text(value)
    left = max(map(len, names)) + 1
    room = max(1, width - left)
    scale = _RooflineAxes(low_x, high_x, low_y, high_y, room, rows)
    # Roofs, trail, then the points in front.
    layers = [
        (_roof_lines(scale, memory, limits.nominal, top), "$text-warning"),
        (_trail_dots(scale, trail), "$accent"),
    ]
    for point, mark, style in marks:
        row = scale.row(point.flops)
        column = scale.column(point.intensity)
        blank = " " * room
        drawn = [blank[:column] + mark + blank[column + 1 :] if at == row else blank for at in range(rows)]
        layers.append((drawn, style))
    lines = right_of_axis(names, layered(layers))
    ticks = [(scale.column(value), f"{value:g}") for value in log_ticks(low_x, high_x, max(1, room // _CELLS_A_TICK))]
    axis = marked(ticks, room)
    unit = " FLOP/byte"
    if axis.endswith(" " * (len(unit) + 1)):
        axis = axis[: -len(unit)] + unit
    return [*lines, Content.styled(" " * left + axis, "$quiet")]


def _roof_lines(scale: _RooflineAxes, memory: float, nominal: float | None, top: float | None) -> list[str]:
    """Draw the slope of the measured memory, dotted that of the nominal one, and the compute roof."""
    canvas = Canvas(scale.width, scale.height)
    for bandwidth, every in ((memory, 1), (nominal, 4)):
        if bandwidth:
            end = scale.high_x
            if top:
                end = min(end, top / bandwidth)
            start = max(scale.low_x, scale.low_y / bandwidth)
            if start < end:
                canvas.line(scale.x(start), scale.y(bandwidth * start), scale.x(end), scale.y(bandwidth * end), every)
    if top:
        canvas.line(scale.x(min(top / memory, scale.high_x)), scale.y(top), 2 * scale.width - 1, scale.y(top))
    return canvas.rows()


def _trail_dots(scale: _RooflineAxes, trail: Sequence[RooflinePoint]) -> list[str]:
    """Draw dotted lines from point to point."""
    canvas = Canvas(scale.width, scale.height)
    dots = [(scale.x(point.intensity), scale.y(point.flops)) for point in trail]
    for (x0, y0), (x1, y1) in pairwise(dots):
        canvas.line(x0, y0, x1, y1, 2)
    return canvas.rows()


def _source(limits: Roofs) -> str:
    """Return where the compute roof comes from; "" if it is measured."""
    if limits.compute is None:
        return "compute roof not measured yet"
    return "compute roof: the vendor's" if limits.vendors else ""


def flops_text(value: float) -> str:
    """Return FLOP/s in three digits with a unit: `145G`."""
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= size * 0.9995:  # three digits round 999.5G and more to 1000G: it is 1T
            return f"{value / size:.3g}{unit}"
    return f"{value:.2g}"
