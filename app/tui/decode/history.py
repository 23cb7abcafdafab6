"""Speed over time: tokens per second and MBU, about a second of decoding a bar, over all answers of this model."""

from collections.abc import Sequence

from textual.content import Content

from headrace.app.tui.decode.axes import even_ticks, labels
from headrace.app.tui.decode.braille import bars, dots_of
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.widgets.lines import Section
from headrace.runtime.metrics.telemetry import mbu

_FULL = 1.05  # a chart reaches this far above its highest bar
_ROWS_A_TICK = 2
_ROWS_A_WHOLE_TICK = 2.0  # nearer, their distances would differ by a half
_LEAST = 12  # cells that a chart can be read in


class HistorySection(Section):
    """Two charts on zero baselines, one above the other; the newest second is at the right."""

    TITLE = "history, a bar a second"

    def change_key(self, metrics: LiveMetrics) -> object:
        samples = metrics.history.samples
        return id(metrics), len(samples), samples[-1] if samples else None, metrics.machine

    def lines(self, metrics: LiveMetrics, width: int, height: int) -> Sequence[Content]:
        samples, peak = metrics.history.samples, metrics.machine.measured_gb_s
        if not samples or width < _LEAST:
            return [Content.styled("after a second of decoding", "$faint")]
        rates = [sample.tokens_per_second for sample in samples]
        if peak is None or height < 4:
            return bar_chart(rates, max(rates) * _FULL, "tok/s", width, height, "$primary")
        now = metrics.machine.memory_gb_s
        shares = [mbu(sample.achieved_gb_s, now, peak) or 0.0 for sample in samples]
        upper = height - height // 2
        return [
            *bar_chart(rates, max(rates) * _FULL, "tok/s", width, upper, "$primary"),
            *bar_chart([100 * share for share in shares], max(100.0, *(100 * s for s in shares)), "MBU %", width,
                       height // 2, "$secondary"),
        ]  # fmt: skip


def bar_chart(
    values: Sequence[float], top: float, name: str, width: int, height: int, style: str, *, whole: bool = False
) -> list[Content]:
    """Return `height` lines of bars with round ticks at the left. top: the full height, above zero.

    name: stands above the ticks; "" leaves its place to a tick. whole: all values are whole numbers, `top` too.
    """
    if whole:
        most = max(1, int((height - 1) / _ROWS_A_WHOLE_TICK))
        count = next(count for count in range(min(most, int(top)), 0, -1) if top % count == 0)
        values = [top / count * place for place in range(count + 1)]
        places = [(max(0, dots_of(value, top, height) - 1) // 4, value) for value in values]
    else:
        top, places = even_ticks(top, height, _ROWS_A_TICK if height > 2 * _ROWS_A_TICK else 1)
    names = [""] * height
    for (line, _), label in zip(places, labels([value for _, value in places]), strict=True):
        names[height - 1 - line] = label
    left = max(len(name), *(len(label) for label in names)) + 1
    if name:
        names[0] = name
    drawn = bars(values, top, width - left, height)
    return [
        Content.assemble((f"{label:>{left - 1}}{'┤' if label else '│'}", "$quiet"), (text, style))
        for label, text in zip(names, drawn, strict=True)
    ]
