"""Decode speed by context length: roofline, measured speeds, expected ones.

The bytes that each token adds to a step are known. The roofline curve is the limit by the measured peak bandwidth and
arithmetic at one token per step. The expected curve assumes the bandwidth and the tokens per step of recent decoding.
"""

from collections.abc import Callable, Sequence

from textual.content import Content

from headrace.app.tui.decode.drawing import Canvas, even_ticks, labels, layered, marked, ticks
from headrace.app.tui.metrics.history import BUCKET
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.widgets.lines import Section, fitting
from headrace.runtime.metrics.cost import StepCost
from headrace.runtime.metrics.limit import step_limit
from headrace.runtime.metrics.units import three_digits

_STEPS = 64  # of the measured bandwidth, of which one can be seen
_FULL = 1.05  # the chart reaches this far above its highest value
_AHEAD = 4  # the chart reaches this many times as far as the context has
_LEAST_SPAN = 2048
_ROWS_A_TICK = 2
_CELLS_A_TICK = 9


class ContextSpeedSection(Section):
    """A chart and a legend."""

    TITLE = "tok/s by context"
    NAME = "context-speed"
    LEAST = 7
    MOST = 60
    CHART = True

    def applies(self, metrics: LiveMetrics) -> bool:
        return metrics.has_steps

    def change_key(self, metrics: LiveMetrics) -> object:
        """Ignore changes too small to see in the chart."""
        achieved = metrics.history.token_gb_s
        peak = metrics.limits.measured_gb_s
        model = metrics.model
        share = round(achieved / peak * _STEPS) if achieved and peak else None
        limits = peak, metrics.limits.flops_per_second, model.context_limit
        return id(metrics), metrics.context // BUCKET, share, limits, model.name, metrics.phase

    def lines(self, metrics: LiveMetrics, width: int, height: int) -> Sequence[Content]:
        cost = metrics.model.cost
        peak = metrics.limits.measured_gb_s
        if cost is None:
            return [Content.styled("no model yet", "$faint").truncate(width, ellipsis=True)]
        if peak is None:
            return [Content.styled("memory bandwidth not measured yet", "$faint").truncate(width, ellipsis=True)]
        if height < 4 or width < 20:
            return [Content.styled("no room here", "$faint").truncate(width, ellipsis=True)]
        achieved = metrics.history.token_gb_s
        span = span_of(metrics.context, metrics.model.context_limit)
        flops_per_second = metrics.limits.flops_per_second
        chart = context_chart(
            cost, peak, achieved, metrics.history.speeds(), span, width, height - 1, flops_per_second=flops_per_second
        )
        self.set_subtitle(f"at {span:,} tokens")
        roofline = expected_rate(cost, peak, span, flops_per_second)
        return [*chart, _legend(cost, roofline, achieved, span, width)]


def span_of(tokens: int, limit: int) -> int:
    """Return the context length that the chart covers, in tokens: present and near future, up to the limit."""
    span = _LEAST_SPAN
    while span < tokens * _AHEAD:
        span *= 2
    return min(span, limit) if limit else span


def expected_rate(cost: StepCost, gb_s: float, context: int, flops_per_second: float | None = None) -> float:
    """Return tokens per second with `context` cache entries, if every byte of a step arrives at this bandwidth.

    flops_per_second: a limit of its arithmetic; None: there is none.
    """
    past = max(0, context - 1)
    return 1 / step_limit(cost.step_bytes(past), cost.step_flops(past), gb_s * 1e9, flops_per_second).seconds


def context_chart(
    cost: StepCost,
    peak_gb_s: float,
    achieved_gb_s: float | None,
    measured: Sequence[tuple[int, float]],
    span: int,
    width: int,
    height: int,
    *,
    flops_per_second: float | None = None,
) -> list[Content]:
    """`height` lines of `width` cells. measured: (context, tokens per second). span: tokens the chart is wide.

    flops_per_second: of the machine; None if unknown.
    """
    rows = height - 1
    highest = [expected_rate(cost, peak_gb_s, 0, flops_per_second), *(rate for _, rate in measured)]
    if achieved_gb_s is not None:  # accepted draft tokens exceed the peak
        highest.append(expected_rate(cost, achieved_gb_s, 0))
    top = max(highest) * _FULL
    top, places = even_ticks(top, rows, _ROWS_A_TICK)
    names = [""] * rows
    for (line, _), label in zip(places, labels([value for _, value in places]), strict=True):
        names[rows - 1 - line] = label
    left = max(len(name) for name in names) + 1
    room = width - left
    layers = [
        (
            _curve(lambda context: expected_rate(cost, peak_gb_s, context, flops_per_second), top, span, room, rows, 3),
            "$text-warning",
        )
    ]
    if achieved_gb_s is not None:
        layers.append(
            (_curve(lambda context: expected_rate(cost, achieved_gb_s, context), top, span, room, rows, 1), "$primary")
        )
    layers.append((_points(measured, top, span, room, rows), "bold $text-accent"))
    lines = [
        Content.assemble((f"{name:>{left - 1}}{'┤' if name else '│'}", "$quiet"), line)
        for name, line in zip(names, layered(layers), strict=True)
    ]
    across = ticks(0.0, span, max(1, room // _CELLS_A_TICK))
    axis = marked([(_column(at, span, room), label) for at, label in zip(across, labels(across), strict=True)], room)
    return [*lines, Content.styled(" " * left + axis, "$quiet")]


def _curve(rate: Callable[[int], float], top: float, span: int, width: int, height: int, every: int) -> list[str]:
    """every: one column of dots of so many is drawn."""
    canvas = Canvas(width, height)
    for x in range(0, 2 * width, every):
        canvas.dot(x, _dot(rate(round(x / (2 * width - 1) * span)), top, height))
    return canvas.rows()


def _points(measured: Sequence[tuple[int, float]], top: float, span: int, width: int, height: int) -> list[str]:
    cells = [[" "] * width for _ in range(height)]
    for context, rate in measured:
        if context <= span:
            cells[_row(rate, top, height)][_column(context, span, width)] = "•"
    return ["".join(row) for row in cells]


def _legend(cost: StepCost, roofline: float, achieved: float | None, span: int, width: int) -> Content:
    """Return the values of both curves at the right end: the second one is the roofline of one token a step."""
    pieces = [Content.assemble(("┈ ", "$text-warning"), (f"{three_digits(roofline)} one token a step", "$quiet"))]
    if achieved is not None:
        rate = three_digits(expected_rate(cost, achieved, span))
        pieces.insert(0, Content.assemble(("─ ", "$primary"), (rate, "bold"), (" expected", "$quiet")))
        pieces.append(Content.assemble(("• ", "bold $text-accent"), ("measured", "$quiet")))
    return fitting(pieces, width)


def _dot(value: float, top: float, height: int) -> int:
    return round(value / top * (4 * height - 1))


def _row(value: float, top: float, height: int) -> int:
    return height - 1 - min(4 * height - 1, _dot(value, top, height)) // 4


def _column(at: float, span: float, width: int) -> int:
    return round(at / span * (2 * width - 1)) // 2
