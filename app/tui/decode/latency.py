"""The step latency history: braille bars on a zero baseline, percentiles, stall marks, and a cursor on one step."""

from bisect import bisect_right
from collections.abc import Sequence

from textual import events
from textual.content import Content

from headrace.app.answer.phrases import duration
from headrace.app.tui.decode.latency_chart import latency_chart
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.widgets.lines import Section, spread
from headrace.runtime.metrics.telemetry import Percentiles, StepRecord
from headrace.runtime.metrics.units import format_bytes

_LEAST = 12  # cells that a chart can be read in


class LatencySection(Section):
    """Inter-token latency of the latest steps, newest at the right; two steps a cell."""

    TITLE = "step latency, ms"

    def __init__(self, metrics: LiveMetrics, id: str | None = None) -> None:
        super().__init__(metrics, id)
        self.cursor: int | None = None
        """Steps back from the newest; None shows no cursor."""
        self._left = 0  # cells of the chart's axis

    def move_cursor(self, by: int) -> None:
        """Move it by steps (positive is newer); past the newest step it disappears."""
        kept = len(self.metrics.latencies_s)
        if not kept:
            return
        at = (self.cursor if self.cursor is not None else -1 if by < 0 else 0) - by
        self.cursor = None if at < 0 else min(at, kept - 1)
        self.redraw()

    def on_mouse_move(self, event: events.MouseMove) -> None:
        offset = event.get_content_offset(self)
        back = None if offset is None else 2 * (self.content_size.width - 1 - offset.x)
        kept = len(self.metrics.latencies_s)
        wanted = back if back is not None and back < kept and offset is not None and offset.x >= self._left else None
        if wanted != self.cursor:
            self.cursor = wanted
            self.redraw()

    def on_leave(self) -> None:
        if self.cursor is not None:
            self.cursor = None
            self.redraw()

    def lines(self, metrics: LiveMetrics, width: int, height: int) -> Sequence[Content]:
        latencies = list(metrics.latencies_s)
        ordered = sorted(latencies)
        itl = Percentiles.of(ordered)
        foot = self._foot(metrics, itl, width)
        chart_height = height - len(foot) - 1
        if itl is None or chart_height < 1 or width < _LEAST:
            waiting = Content.styled("no steps yet", "$faint")
            return [waiting, *[Content("")] * max(0, height - 1 - len(foot)), *foot]
        chart = latency_chart(latencies, itl, metrics.steps[-1].index, width, chart_height, self.cursor)
        self._left = chart.left
        marks = self._marks(latencies, ordered, metrics.stall_s(itl.p50), width - chart.left, chart.left)
        return [marks, *chart.lines, *foot]

    def _marks(self, latencies: list[float], ordered: list[float], stall_s: float, width: int, left: int) -> Content:
        """The line above the chart: ▼ over the cursor, ▲ where a step stalled."""
        marks = [" "] * width
        for place, latency in enumerate(reversed(latencies[-2 * width :])):
            if latency > stall_s:
                marks[width - 1 - place // 2] = "▲"
        stalls = len(ordered) - bisect_right(ordered, stall_s)
        line = Content.styled("".join(marks), "bold $text-error")
        if self.cursor is not None and self.cursor // 2 < width:
            at = width - 1 - self.cursor // 2
            line = Content.assemble(line[:at], ("▼", "bold $text-accent"), line[at + 1 :])
        label = f"▲{stalls}" if stalls else ""
        return Content.assemble((f"{label:<{left}}", "bold $text-error"), line)

    def _foot(self, metrics: LiveMetrics, itl: Percentiles | None, width: int) -> list[Content]:
        if self.cursor is not None and self.cursor < len(metrics.latencies_s):
            return _step_lines(metrics.steps[-1 - self.cursor], width)
        if itl is None:
            return []
        pieces: list[tuple[str, str]] = []
        for name, value in (("p50", itl.p50), ("p95", itl.p95), ("p99", itl.p99), ("max", itl.max)):
            gap = "  " if width >= 44 else " "
            pieces += [(f"{name} ", "$quiet"), (f"{_milliseconds(value)}{gap}", "bold")]
        return [Content.assemble(*pieces).truncate(width)]


def _milliseconds(value: float) -> str:
    return f"{value * 1e3:.2f}" if value < 0.00995 else f"{value * 1e3:.1f}" if value < 0.0995 else f"{value * 1e3:.0f}"


def _step_lines(step: StepRecord, width: int) -> list[Content]:
    """Return one step's record as two lines."""
    first = Content.assemble(
        (f"step {step.index}", "bold $text-accent"),
        ("  context ", "$quiet"),
        f"{step.context}",
        ("  latency ", "$quiet"),
        (duration(step.latency_s), "bold"),
    )
    second = Content.assemble(
        f"{step.achieved_gb_s:.1f} GB/s",
        ("  KV ", "$quiet"),
        format_bytes(step.kv_bytes_read),
        ("  of ", "$quiet"),
        format_bytes(step.step_bytes),
    )
    return [spread(first, Content(""), width).truncate(width), second.truncate(width)]
