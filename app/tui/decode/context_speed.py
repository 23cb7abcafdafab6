"""Decode speed by context length: roofline, measured speeds, expected ones.

The bytes that each token adds to a step are known. The roofline curve is the limit by the measured peak bandwidth and
arithmetic at one token per step. The expected curve assumes the bandwidth and the tokens per step of recent decoding.

`context_chart` draws numbers alone; the section takes them from `LiveMetrics.history`.
tests/tui/test_charts.py guards this.
"""

from collections.abc import Callable, Sequence

from msgspec import Struct
from textual.content import Content

from headrace.app.tui.decode.drawing import Canvas, even_ticks, labels, layered, marked, right_of_axis, ticks
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.metrics.rates import BUCKET
from headrace.app.tui.widgets.lines import Section, fitting
from headrace.runtime.metrics.cost import StepCost, step_limit
from headrace.runtime.metrics.units import three_digits

_STEPS = 64  # of the measured bandwidth: a smaller change cannot be seen, and draws nothing
_FULL = 1.05  # the chart reaches this far above its highest value
_AHEAD = 4  # the chart reaches this many times as far as the context has
_LEAST_SPAN = 2048  # tokens that the chart covers, at least
_ROWS_A_TICK = 2  # lines from tick to tick, at least
_CELLS_A_TICK = 9  # cells from tick to tick, about: a label of five digits with its mark


class ContextSpeedSection(Section):
    """A chart and a legend."""

    TITLE = "tok/s by context"
    NAME = "context-speed"
    MIN_LINES = 7
    MAX_LINES = 60
    IS_CHART = True

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
    """Return the lines of the chart.

    cost: of a step of the model.
    peak_gb_s: bandwidth of the roofline.
    achieved_gb_s: bandwidth of the expected curve; None: it is not drawn.
    measured: (context, tokens per second).
    span: tokens from the left end to the right one.
    width, height: cells and lines.
    flops_per_second: of the machine; None if unknown.
    """
    rows = height - 1
    highest = [expected_rate(cost, peak_gb_s, 0, flops_per_second), *(rate for _, rate in measured)]
    if achieved_gb_s is not None:  # accepted draft tokens exceed the peak
        highest.append(expected_rate(cost, achieved_gb_s, 0))
    top, tick_lines = even_ticks(max(highest) * _FULL, rows, _ROWS_A_TICK)
    names = [""] * rows
    for (line, _), label in zip(tick_lines, labels([value for _, value in tick_lines]), strict=True):
        names[rows - 1 - line] = label
    left = max(len(name) for name in names) + 1
    scale = _ContextAxes(top, span, width - left, rows)
    roofline = scale.curve(lambda context: expected_rate(cost, peak_gb_s, context, flops_per_second), every=3)
    layers = [(roofline, "$text-warning")]
    if achieved_gb_s is not None:
        expected = scale.curve(lambda context: expected_rate(cost, achieved_gb_s, context))
        layers.append((expected, "$primary"))
    layers.append((scale.points(measured), "bold $text-accent"))
    lines = right_of_axis(names, layered(layers))
    across = ticks(0.0, span, max(1, scale.width // _CELLS_A_TICK))
    columns = [scale.column(context) for context in across]
    axis = marked(list(zip(columns, labels(across), strict=True)), scale.width)
    return [*lines, Content.styled(" " * left + axis, "$quiet")]


class _ContextAxes(Struct, frozen=True):
    """Axes from zero.

    top: tokens per second at the upper end.
    span: tokens of context at the right end.
    width, height: cells and lines.
    """

    top: float
    span: int
    width: int
    height: int

    def curve(self, rate: Callable[[int], float], every: int = 1) -> list[str]:
        """Return a curve of tokens per second by context. every: 2 draws each second column of dots."""
        canvas = Canvas(self.width, self.height)
        for x in range(0, 2 * self.width, every):
            canvas.dot(x, self._dot(rate(round(x / (2 * self.width - 1) * self.span))))
        return canvas.rows()

    def points(self, measured: Sequence[tuple[int, float]]) -> list[str]:
        """Return a point for each (context, tokens per second)."""
        cells = [[" "] * self.width for _ in range(self.height)]
        for context, rate in measured:
            if context <= self.span:
                row = self.height - 1 - min(4 * self.height - 1, self._dot(rate)) // 4
                cells[row][self.column(context)] = "•"
        return ["".join(row) for row in cells]

    def column(self, context: float) -> int:
        return round(context / self.span * (2 * self.width - 1)) // 2

    def _dot(self, rate: float) -> int:
        return round(rate / self.top * (4 * self.height - 1))


def _legend(cost: StepCost, roofline: float, achieved: float | None, span: int, width: int) -> Content:
    """Return the values of both curves at the right end: the second one is the roofline of one token a step."""
    pieces = [Content.assemble(("┈ ", "$text-warning"), (f"{three_digits(roofline)} one token a step", "$quiet"))]
    if achieved is not None:
        rate = three_digits(expected_rate(cost, achieved, span))
        pieces.insert(0, Content.assemble(("─ ", "$primary"), (rate, "bold"), (" expected", "$quiet")))
        pieces.append(Content.assemble(("• ", "bold $text-accent"), ("measured", "$quiet")))
    return fitting(pieces, width)
