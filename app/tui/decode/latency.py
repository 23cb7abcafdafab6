"""Step latency as history and histogram on one axis, stalls marked with their cause, and a cursor over the steps.

Two steps a cell, the newest at the right. A dotted line at the p50 of the answer and a sparser one at its p95 cross the
chart; `↑` marks a bar cut off at the top. Below the chart, where nothing else shows the answer, is its text around the
cursor's step.

    marks     ▼ over the cursor, letters over stalls
    chart     labels │ bars │ histogram     `latency_chart`
    numbers   of steps
    text      of the answer, in F2 only     `StepTexts`
    foot      the cursor's record, or colours and causes

Positions of steps count back from the newest one: 0 is the newest. So one position is the same step in `latency_steps`
and in `charted`, which has one step more at its beginning.

tests/tui/test_charts.py and tests/tui/screens/test_decode_screen.py guard this.
"""

import os
from collections import Counter
from collections.abc import Iterable, Sequence

from textual import events
from textual.content import Content

from headrace.app.answer.answer_steps import nearness
from headrace.app.tui.decode.drawing import bars, dots_of, dotted, even_ticks, labels, marked, ticks
from headrace.app.tui.decode.step_text import StepTexts, TokenLines, record_line, text_legend
from headrace.app.tui.metrics.figures import STALL, LatencyWindow, histogram, latency_window
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.widgets.lines import Section, legend, spread
from headrace.runtime.metrics.telemetry import Percentiles
from headrace.runtime.metrics.units import counted, format_milliseconds

HEADROOM = 1.25  # the chart reaches this far above p99, at most up to stalls
_COLOURS = ("$primary", "$warning", "$error")  # of bars, by `nearness` to the median
_LEAST_CHART = 3  # lines
_CAUSES_FROM = 7  # lines from which one names the causes of stalls
_TEXT_LINES = ((14, 3), (9, 2), (6, 1), (0, 0))  # of the answer, from a height on
_LEAST = 12  # cells that a chart can be read in
_AXIS = 9  # cells left of the bars
_HISTOGRAM = 12  # cells
_HISTOGRAM_FROM = 44  # cells of a section that has a histogram
_ROWS_A_TICK = 2  # lines from tick to tick, at least
_CELLS_A_TICK = 10  # cells from step number to step number, about
_LEAST_S = 1e-6  # height of the chart, at least: latencies of 0 have one, too
_NUMBERS_FROM = 4  # lines of a chart that can spare one for the steps' numbers
_MARKS = {"prefill": "P", "growth": "G", "garbage": "C", "other": "O"}  # by the first word of `figures.stall_cause`
_UNKNOWN = "?"
_SUMMED = "+"


class LatencySection(Section):
    """Latency of the latest steps; of parallel answers, the steps of the sequence that has most."""

    TITLE = "step latency, ms"
    NAME = "latency"
    MIN_LINES = 7
    MAX_LINES = 60
    IS_CHART = True

    def __init__(self, metrics: LiveMetrics, *, with_text: bool = False) -> None:
        """with_text: show the answer's text, too."""
        super().__init__(metrics)
        self._with_text = with_text
        self._layout = TokenLines()
        self.cursor: int | None = None
        """Steps back from the newest; None shows no cursor."""

    @property
    def _num_steps(self) -> int:
        """Number of steps that a cursor can stand on."""
        return len(self.metrics.latency_steps)

    def move_cursor(self, by: int) -> None:
        """Move it by steps (positive is newer); past the newest step it disappears."""
        before = -1  # one key towards older steps shows it on the newest
        if self.cursor is not None:
            before = self.cursor
        back = min(before - by, self._num_steps - 1)
        self._set_cursor(back if back >= 0 else None)

    def on_mouse_move(self, event: events.MouseMove) -> None:
        offset = event.get_content_offset(self)
        cursor = None
        if offset is not None and offset.x >= _AXIS:
            back = 2 * (_AXIS + _bar_cells(self.content_size.width) - 1 - offset.x)
            if 0 <= back < self._num_steps:
                cursor = back
        self._set_cursor(cursor)

    def on_leave(self) -> None:
        self._set_cursor(None)

    def _set_cursor(self, back: int | None) -> None:
        if back != self.cursor:
            self.cursor = back
            self.redraw()

    def lines(self, metrics: LiveMetrics, width: int, height: int) -> Sequence[Content]:
        cells = _bar_cells(width)
        back = 0  # steps between the newest one and the last that is drawn
        cursor = None  # steps back from the last that is drawn
        if self.cursor is not None:
            back = max(0, self.cursor + 1 - 2 * cells)  # the chart follows a cursor that leaves it
            cursor = self.cursor - back
        steps = metrics.latency_steps
        window = latency_window(steps, metrics.latencies, metrics.busy_steps, 2 * cells, back=back)
        if window is None:
            self.set_subtitle("")
            return [Content.styled("no steps yet", "$faint").truncate(width, ellipsis=True)]
        self.set_subtitle(self._window_text(window))
        text = self._text(metrics, window, width, height)
        if height < _LEAST_CHART + 1 or width < _LEAST + _AXIS:
            return [_percentiles(window, width)]
        foot = self._foot(metrics, width, has_text=bool(text))
        causes = Content("")
        if height >= _CAUSES_FROM + len(text):
            causes = _cause_line(window.stalls.values(), width)
            if causes:
                foot.append(causes)
        elif foot and self.cursor is None:  # too low for a line of its own: left of the legend
            room = width - foot[0].cell_length - 1
            if room >= _LEAST:
                causes = _cause_line(window.stalls.values(), room)
                if causes:
                    foot = [spread(causes, foot[0], width)]
        chart = latency_chart(window, width, height - len(text) - len(foot) - 1, cursor)
        return [self._marks(window, cells, cursor, causes.plain.split()), *chart, *text, *foot]

    def _window_text(self, window: LatencyWindow) -> str:
        """Return the steps that are drawn, of all that are kept."""
        if self.cursor is not None:
            return f"steps {window.steps[0].index:,} to {window.steps[-1].index:,}"
        num_drawn = len(window.steps)
        if num_drawn < self._num_steps:
            return f"the last {num_drawn:,} of {self._num_steps:,} steps"
        return counted(num_drawn, "step")

    def _text(self, metrics: LiveMetrics, window: LatencyWindow, width: int, height: int) -> list[Content]:
        """Return lines of the answer around the cursor's step or the newest one."""
        if not self._with_text or not metrics.texts:
            return []
        count = next(lines for least, lines in _TEXT_LINES if height >= least)
        steps = list(metrics.answer.records)
        marked_step = None
        if self.cursor is not None:
            marked_step = max(0, len(steps) - 1 - self.cursor)
        return StepTexts(steps, metrics.texts, window.percentiles.p50, marked_step).lines(self._layout, width, count)

    def _foot(self, metrics: LiveMetrics, width: int, *, has_text: bool) -> list[Content]:
        """Return the record of the cursor's step; without a cursor, the colours of a text."""
        if self.cursor is not None and self.cursor < self._num_steps:
            step = metrics.charted[-1 - self.cursor]  # as in `latency_steps`, see the module
            text = None
            if step.index < len(metrics.texts):
                text = metrics.texts[step.index]
            return [record_line(step, text, width)]
        if not has_text or os.environ.get("NO_COLOR"):
            return []
        return [text_legend(has_drafts=metrics.totals.proposed > 0).truncate(width)]

    def _marks(self, window: LatencyWindow, cells: int, cursor: int | None, explained: Sequence[str]) -> Content:
        """Return the line above the chart: ▼ over the cursor, and marks over steps that stalled.

        window: the steps of the chart.
        cells: width of the chart without its axis and histogram.
        cursor: steps back from the chart's last one; None: without a cursor.
        explained: words of the line that names the causes; letters that it lacks are in its sum, `+`.
        """
        marks = [" "] * cells
        for index, cause in window.stalls.items():
            # No letter without its explanation below; none at all where there is no room for the line.
            mark = next((mark for mark in (_mark(cause), _SUMMED) if mark in explained), " ")
            marks[cells - 1 - (len(window.steps) - 1 - index) // 2] = mark
        line = Content.styled("".join(marks), "bold $text-error")
        if cursor is not None and cursor // 2 < cells:
            line = _replace_cell(line, cells - 1 - cursor // 2, "▼", "bold $text-accent")
        return Content.assemble(" " * _AXIS, line)


def latency_chart(window: LatencyWindow, width: int, height: int, cursor: int | None = None) -> list[Content]:
    """Return history, histogram, and below them the numbers of steps.

    window: the steps to draw.
    width: cells of each line.
    height: number of lines.
    cursor: steps back from the last one of the window; None: without a cursor.
    """
    # The axis: up to a little above p99, but no further than to stalls.
    rows = height
    if height > _NUMBERS_FROM:
        rows -= 1
    percentiles = window.percentiles
    high = percentiles.p99
    if percentiles.p50 > 0:
        high = min(percentiles.p99 * HEADROOM, STALL * percentiles.p50)
    top_ms, tick_lines = even_ticks(max(high, _LEAST_S) * 1e3, rows, _ROWS_A_TICK)
    top = top_ms / 1e3
    # The bars, with dotted lines through them at the percentiles.
    histogram_width = _histogram_cells(width)
    room = _bar_cells(width)
    shown = window.latencies_s[-2 * room :]
    drawn = bars(shown, top, room, rows)
    for value, every in ((percentiles.p95, 4), (percentiles.p50, 2)):
        if value <= top:
            drawn = dotted(drawn, dots_of(value, top, rows) - 1, every)
    too_high = {room - 1 - back // 2 for back, latency in enumerate(reversed(shown)) if latency > top}
    # Line by line: label, bars, histogram.
    counts = histogram(shown, top, rows)
    max_count = max(counts)
    lines = []
    for row, (name, text) in enumerate(zip(_names(percentiles, top, rows, tick_lines), drawn, strict=True)):
        # By the row's lower end, so that all in a coloured row is as slow as its colour says.
        style = colour((rows - row - 1) / rows * top, percentiles.p50)
        body = Content.styled(text, style)
        if row == 0:
            for column in too_high:
                body = _replace_cell(body, column, "↑", "bold $text-error")
        if cursor is not None and cursor // 2 < room:
            column = room - 1 - cursor // 2
            body = _replace_cell(body, column, text[column].replace(" ", "│"), "bold $text-accent")  # bars stay
        if histogram_width:
            share = counts[row] / max(1, max_count)
            body = Content.assemble(body, (" ▏", "$quiet"), _bar(share, histogram_width - 2, style))
        lines.append(Content.assemble((name + _axis_mark(name), "$quiet"), body))
    if rows < height:
        numbers = f"{'step':>{_AXIS - 1}} {_numbers(window.steps[-1].index, room)}"
        if histogram_width:
            numbers += f" ▏{max_count:,} steps".ljust(histogram_width)
        lines.append(Content.styled(numbers[:width], "$quiet"))
    return lines


def _replace_cell(line: Content, column: int, text: str, style: str) -> Content:
    """Return a line with another character in one column."""
    return Content.assemble(line[:column], (text, style), line[column + 1 :])


def _axis_mark(name: str) -> str:
    """Return the axis's character right of a label: a dotted line starts at a percentile, a tick at a number."""
    if name.startswith("p"):
        return "┈"
    return "│" if name.isspace() else "┤"


def _histogram_cells(width: int) -> int:
    """Return the cells of the histogram in a section of this width; 0 without one."""
    return _HISTOGRAM if width >= _HISTOGRAM_FROM else 0


def _bar_cells(width: int) -> int:
    """Return the cells of the steps' bars in a section of this width."""
    return max(1, width - _AXIS - _histogram_cells(width))


def _bar(share: float, width: int, style: str) -> Content:
    cells = "█" * (round(share * width) or int(share > 0))
    return Content.styled(f"{cells:<{width}}", style)


def colour(latency_s: float, p50: float) -> str:
    """Return the style for a latency, by its distance from the median."""
    return _COLOURS[nearness(latency_s, p50)]


def _names(percentiles: Percentiles, top: float, rows: int, tick_lines: Sequence[tuple[int, float]]) -> list[str]:
    """Return the labels left of each line: percentiles with their values, else round milliseconds at `tick_lines`."""
    room = _AXIS - 1
    names = [" " * room] * rows
    for (line, _), label in zip(tick_lines, labels([value for _, value in tick_lines]), strict=True):
        names[rows - 1 - line] = f"{label:>{room}}"
    for value, label in ((percentiles.p95, "p95"), (percentiles.p50, "p50")):
        if rows > 2 and value <= top:
            row = rows - 1 - max(0, dots_of(value, top, rows) - 1) // 4
            number = format_milliseconds(value)
            names[row] = f"{label} {number:>{room - len(label) - 1}}"
            if len(names[row]) > room:
                names[row] = label.ljust(room)
    return names


def _numbers(newest: int, room: int) -> str:
    """Round step numbers below their steps."""
    oldest = max(1, newest - 2 * room + 1)
    marked_steps = ticks(oldest, newest, max(1, min(room // _CELLS_A_TICK, newest - oldest)))
    named = zip(marked_steps, labels(marked_steps), strict=True)
    return marked([(room - 1 - (newest - round(position)) // 2, label) for position, label in named], room)


def _mark(cause: str) -> str:
    """Return the letter of a stall's cause."""
    return _MARKS.get(cause.split(" ", 1)[0], _UNKNOWN)


def _cause_line(stalls: Iterable[str], width: int) -> Content:
    """Return the causes of stalls, the most frequent first; those that do not fit are summed."""
    style = "$text-error"
    causes = Counter(stalls).most_common()
    pieces = [Content.styled(f"{_mark(cause)} {count}x {cause or 'unknown cause'}", style) for cause, count in causes]

    def rest(shown: int) -> Content:
        return Content.styled(f"{_SUMMED} {sum(count for _, count in causes[shown:])}x more", style)

    return legend(pieces, rest, width, max_lines=1, gap=1)[0] if pieces else Content("")


def _percentiles(window: LatencyWindow, width: int) -> Content:
    """Return the percentiles in the place of a chart."""
    gap = "  " if width >= 44 else " "
    percentiles = window.percentiles
    pieces: list[tuple[str, str]] = []
    for name, value in (
        ("p50", percentiles.p50),
        ("p95", percentiles.p95),
        ("p99", percentiles.p99),
        ("max", percentiles.max),
    ):
        pieces += [(f"{name} ", "$quiet"), (f"{format_milliseconds(value)}{gap}", "bold")]
    return Content.assemble(*pieces).truncate(width)
