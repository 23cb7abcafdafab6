"""Batch size of each pass over time, and the weight bytes per token that follow."""

from collections.abc import Sequence
from itertools import pairwise

from textual.content import Content

from headrace.app.tui.decode.history import bar_chart
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.widgets.lines import Section, spread
from headrace.runtime.metrics.units import format_bytes

_LEAST = 12  # cells that a chart can be read in
_AXIS = 6  # cells of them left of the bars


class BatchSizeSection(Section):
    """All passes of the turn, the newest at the right; below, the weight bytes of a token."""

    TITLE = "batch size, pass by pass"

    def change_key(self, metrics: LiveMetrics) -> object:
        return None if metrics.batch is None else (id(metrics), metrics.version)

    def lines(self, metrics: LiveMetrics, width: int, height: int) -> Sequence[Content]:
        batch = metrics.batch
        if batch is None:
            return []
        foot: list[Content] = []
        if (each := batch.weight_bytes_per_token) is not None:
            left = Content.assemble(
                ("weights ", "$quiet"), (f"{format_bytes(round(each))}", "bold"), ("/token", "$quiet")
            )
            foot.append(spread(left, Content.styled(f"of {format_bytes(batch.weight_bytes)} a pass", "$quiet"), width))
        if not batch.batches or width < _LEAST or height - len(foot) < 1:
            return [Content.styled("no passes yet", "$faint"), *foot]
        top, lines = max(len(batch.rows), *batch.batches), height - len(foot)
        sizes = squeezed(list(batch.batches), 2 * (width - _AXIS))
        return [*bar_chart(sizes, float(top), "", width, lines, "$primary", whole=True), *foot]


def squeezed(values: Sequence[float], most: int) -> list[float]:
    """Return at most `most` values: means of stretches as even as possible."""
    count = min(len(values), most)
    ends = [round(place * len(values) / count) for place in range(count + 1)]
    return [sum(values[start:end]) / (end - start) for start, end in pairwise(ends)]
