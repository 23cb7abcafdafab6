"""Chart of step latencies: bars on a zero baseline with axes and percentiles. No widget, no clock.

Two steps per cell, the newest at the right. Bars far above the median have another colour. A dotted line at p50 and a
sparser one at p95 cross the chart; `↑` marks a bar cut off at the top. The percentiles are the caller's.
Labels are left out if they would take half of the width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from textual.content import Content

from headrace.app.tui.decode.axes import even_ticks, labels, marked, ticks
from headrace.app.tui.decode.braille import bars, dots_of, dotted
from headrace.runtime.metrics.telemetry import Percentiles

HEADROOM = 1.25  # the chart reaches this far above p99
_ROWS_A_TICK = 2
_CELLS_A_TICK = 10
_NEAR, _FAR = 1.25, 2.0  # times the median
_LEAST_S = 1e-6  # height of the chart
_AXIS_FROM = 4  # lines of a chart that can spare one for the steps' numbers


@dataclass(frozen=True, slots=True)
class LatencyChart:
    """`lines`, the first `left` cells of each of which are the axis."""

    lines: list[Content]
    left: int


def latency_chart(
    latencies_s: Sequence[float], of: Percentiles, newest: int, width: int, height: int, cursor: int | None = None
) -> LatencyChart:
    """`height` lines of `width` cells. newest: the last latency's step number. cursor: steps back from it.

    latencies_s: one at least. of: percentiles of all steps, also of those left of the chart.
    """
    rows = height - 1 if height > _AXIS_FROM else height
    top_ms, places = even_ticks(max(of.p99 * HEADROOM, _LEAST_S) * 1e3, rows, _ROWS_A_TICK)
    top = top_ms / 1e3
    names = _names(of, top, rows, places)
    if len(names[0]) >= width // 2:
        names = [" "] * rows
    left = len(names[0]) + 1
    room = width - left
    shown = latencies_s[-2 * room :]
    drawn = bars(shown, top, room, rows)
    for value, every in ((of.p95, 4), (of.p50, 2)):
        drawn = dotted(drawn, dots_of(value, top, rows) - 1, every)
    cut = {room - 1 - back // 2 for back, latency in enumerate(reversed(shown)) if latency > top}
    at = room - 1 - cursor // 2 if cursor is not None and cursor // 2 < room else None
    lines = []
    for row, (name, text) in enumerate(zip(names, drawn, strict=True)):
        mark = "┈" if name.startswith("p") else "│" if name.isspace() else "┤"
        body = Content.styled(text, colour((rows - row - 0.5) / rows * top, of.p50))
        for column in cut if row == 0 else ():
            body = Content.assemble(body[:column], ("↑", "bold $text-error"), body[column + 1 :])
        if at is not None:
            body = Content.assemble(body[:at], (_under(text[at]), "bold $text-accent"), body[at + 1 :])
        lines.append(Content.assemble((f"{name}{mark}", "$quiet"), body))
    if rows < height:
        lines.append(Content.styled(f"{'step' if left > 4 else '':>{left - 1}} {_numbers(newest, room)}", "$quiet"))
    return LatencyChart(lines, left)


def colour(latency_s: float, p50: float) -> str:
    """Return the style for a latency, by its distance from the median."""
    if latency_s <= p50 * _NEAR:
        return "$primary"
    return "$accent" if latency_s <= p50 * _FAR else "$error"


def _names(of: Percentiles, top: float, rows: int, places: Sequence[tuple[int, float]]) -> list[str]:
    """Return the labels left of each line, of one width: percentiles, and round milliseconds at `places`."""
    milliseconds, percentiles = [""] * rows, [""] * rows
    for (line, _), label in zip(places, labels([value for _, value in places]), strict=True):
        milliseconds[rows - 1 - line] = label
    for value, label in ((of.p95, "p95"), (of.p50, "p50")):
        if rows > 2:
            percentiles[_row(value, top, rows)] = label
    width = max(map(len, milliseconds))
    return [f"{label:<4}{number:>{width}}" for label, number in zip(percentiles, milliseconds, strict=True)]


def _row(value: float, top: float, rows: int) -> int:
    return rows - 1 - max(0, dots_of(value, top, rows) - 1) // 4


def _numbers(newest: int, room: int) -> str:
    """Round step numbers below their steps."""
    oldest = max(1, newest - 2 * room + 1)
    places = ticks(oldest, newest, max(1, min(room // _CELLS_A_TICK, newest - oldest)))
    named = zip(places, labels(places), strict=True)
    return marked([(room - 1 - (newest - round(place)) // 2, label) for place, label in named], room)


def _under(text: str) -> str:
    """The cursor's line, behind a bar where there is one."""
    return text if text != " " else "│"
