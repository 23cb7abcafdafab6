"""The roofline: a log-log plot of FLOP/s over arithmetic intensity, with this model's decode and prefill points.

After Williams, Waterman and Patterson, "Roofline" (CACM 2009). The slope is the measured memory bandwidth; the flat
roof is the vendor's half-precision peak where the chip table states one. Points are computed from shapes and times.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from textual.content import Content

from headrace.app.tui.decode.braille import Canvas
from headrace.app.tui.decode.metrics import LiveMetrics
from headrace.app.tui.decode.section import Section, spread

_LABEL = 6
_ROOMY = 52  # cells from which the legend says the intensities too


@dataclass(frozen=True, slots=True)
class Point:
    """A place on the plot: FLOP per byte, FLOP per second, and how it is drawn."""

    intensity: float
    flops: float
    mark: str
    style: str


class RooflineSection(Section):
    """Where decode and prefill stand under the machine's ceilings."""

    TITLE = "roofline, FLOP/s (computed)"

    def lines(self, metrics: LiveMetrics, width: int, height: int) -> Sequence[Content]:
        points = [point for point in (decode_point(metrics), prefill_point(metrics)) if point]
        bandwidth = metrics.machine.measured_gb_s
        if bandwidth is None or not points or height < 4:
            return [Content.styled("after the first answer", "$faint")]
        roof = metrics.machine.peak_flops
        if roof is None and not self.border_subtitle:
            self.border_subtitle = Content("compute peak unknown")
        return [*_plot(points, bandwidth * 1e9, roof, width, height - 2), *_legend(points, width)]


def decode_point(metrics: LiveMetrics) -> Point | None:
    """Decode of the last second."""
    last, rate, flops = metrics.last, metrics.rate_now, metrics.model.flops_per_token
    if last is None or rate is None or not flops:
        return None
    return Point(flops / last.step_bytes, flops * rate, "◆", "bold $text-accent")


def prefill_point(metrics: LiveMetrics) -> Point | None:
    """The latest prefill worth the name: its tokens share one reading of the weights."""
    rate, flops, weights = metrics.prefill_rate, metrics.model.flops_per_token, metrics.model.weight_bytes
    if rate is None or not flops or not weights:
        return None
    return Point(flops * metrics.prefill_batch / weights, flops * rate, "▲", "bold $text-success")


def _plot(points: list[Point], bandwidth: float, roof: float | None, width: int, height: int) -> list[Content]:
    canvas_width, canvas_height = width - _LABEL, height
    low_x = math.floor(math.log10(min(point.intensity for point in points)) - 0.5)
    high_x = math.ceil(math.log10(max(*(p.intensity for p in points), roof / bandwidth if roof else 1.0)) + 0.5)
    top = roof or max(point.flops for point in points) * 10
    high_y = math.ceil(math.log10(top))
    low_y = math.floor(math.log10(min(min(point.flops for point in points), bandwidth * 10**low_x)))
    canvas = Canvas(canvas_width, canvas_height)
    across, up = 2 * canvas_width - 1, 4 * canvas_height - 1

    def x_of(value: float) -> int:
        return round((math.log10(value) - low_x) / (high_x - low_x) * across)

    def y_of(value: float) -> int:
        return round((math.log10(value) - low_y) / (high_y - low_y) * up)

    knee = roof / bandwidth if roof else 10**high_x
    canvas.line(x_of(10**low_x), y_of(bandwidth * 10**low_x), x_of(knee), y_of(bandwidth * knee))
    if roof:
        canvas.line(x_of(knee), y_of(roof), across, y_of(roof))
    rows = [Content.styled(text, "$text-warning") for text in canvas.rows()]
    for point in points:
        column, line = x_of(point.intensity) // 2, canvas_height - 1 - y_of(point.flops) // 4
        if 0 <= line < canvas_height and 0 <= column < canvas_width:
            before, after = rows[line][:column], rows[line][column + 1 :]
            rows[line] = Content.assemble(before, (point.mark, point.style), after)
    labels = {0: _flops(10**high_y), canvas_height - 1: _flops(10**low_y)}
    lines = [
        Content.assemble((f"{labels.get(number, ''):>{_LABEL - 1}} ", "$quiet"), line)
        for number, line in enumerate(rows)
    ]
    axis = spread(Content(f"{10**low_x:g}"), Content(f"FLOP/byte {10**high_x:g}"), canvas_width)
    return [*lines, Content.assemble(" " * _LABEL, axis.stylize("$quiet"))]


def _legend(points: list[Point], width: int) -> list[Content]:
    names = {"◆": "decode", "▲": "prefill"}
    pieces: list[Content] = []
    for point in points:
        intensity = f" {_intensity(point.intensity)} FLOP/B" if width >= _ROOMY else ""
        text = f" {names[point.mark]}{intensity} {_flops(point.flops)}  "
        pieces.append(Content.assemble((point.mark, point.style), (text, "$quiet")))
    return [Content.assemble(*pieces).truncate(width)]


def _flops(value: float) -> str:
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.2g}"


def _intensity(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"
