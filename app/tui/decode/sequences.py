"""Sequences of a batch: a row each, with a chart of step latencies where it fits."""

from collections.abc import Sequence

from textual.content import Content

from headrace.app.answer.phrases import rate_digits
from headrace.app.tui.decode.braille import bars
from headrace.app.tui.decode.latency_chart import HEADROOM
from headrace.app.tui.metrics.batch import OVER, Row, RowPhase
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.widgets.lines import Section

_COLUMNS = (("", 3), ("phase", 10), ("tokens", 7), ("tok/s", 7), ("p50 ms", 7), ("p95 ms", 7), ("max", 7))
_BETWEEN = 3  # cells between figures and chart
_LEAST = 16  # cells that a chart can be read in
_TALLEST = 8  # lines of one, the row's own included
_WORDS: dict[RowPhase, str] = {
    "waiting": "… waiting",
    "prefill": "◌ prefill",
    "decode": "● decode",
    "preempted": "⧗ paused",
    "done": "✓ done",
    "stopped": "■ stopped",
    "failed": "✗ failed",
}


class SequencesSection(Section):
    """Phase, tokens, speed and ITL of each; columns that do not fit are left out from the right."""

    TITLE = "sequences"

    def change_key(self, metrics: LiveMetrics) -> object:
        return None if metrics.batch is None else (id(metrics), metrics.version)

    def lines(self, metrics: LiveMetrics, width: int, height: int) -> Sequence[Content]:
        if metrics.batch is None:
            return []
        shown, used = 0, 0
        for _, cells in _COLUMNS:
            if used + cells > width:
                break
            shown, used = shown + 1, used + cells
        head = "".join(
            f"{name:<{cells}}" if n < 2 else f"{name:>{cells}}" for n, (name, cells) in enumerate(_COLUMNS[:shown])
        )
        rows, room = metrics.batch.rows, width - used - _BETWEEN
        top = HEADROOM * max((itl.p95 for row in rows if (itl := row.itl)), default=0.0)
        tall, beside = min(_TALLEST, (height - 1) // len(rows)), room >= _LEAST
        if not top or tall < (1 if beside else 2):
            return [Content.styled(head, "$quiet"), *(_line(row, shown) for row in rows)]
        scale = f"{'':{_BETWEEN}}latency, bars to {_milliseconds(top)} ms" if beside else ""
        lines = [Content.styled(head + scale, "$quiet")]
        for row in rows:
            style = "$secondary" if row.phase in OVER else "$primary"
            figures, latencies = _line(row, shown), list(row.latencies_s)
            if beside:
                left = [figures, *[Content(" " * used)] * (tall - 1)]
                charted = zip(left, bars(latencies, top, room, tall), strict=True)
                lines += [Content.assemble(cells, " " * _BETWEEN, (chart, style)) for cells, chart in charted]
            else:
                lines += [figures, *(Content.styled(chart, style) for chart in bars(latencies, top, width, tall - 1))]
        return lines


def _line(row: Row, shown: int) -> Content:
    itl = row.itl
    figures = [_milliseconds(value) for value in (itl.p50, itl.p95, itl.max)] if itl else ["–"] * 3
    read = f"{row.prefill_done / row.prefill_total:.0%}" if row.prefill_total else ""
    said = read if row.phase == "prefill" else f"{row.tokens:,}"
    cells = [f"{row.number}", _WORDS[row.phase], said, rate_digits(row.tokens_per_second), *figures]
    text = "".join(
        f"{cell:<{room}}" if n < 2 else f"{cell:>{room}}"
        for n, (cell, (_, room)) in enumerate(zip(cells[:shown], _COLUMNS, strict=False))
    )
    style = "$text-accent" if row.phase == "decode" else "$text-error" if row.phase == "failed" else ""
    return Content.styled(text, "$quiet" if row.phase in OVER and row.phase != "failed" else style)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if seconds < 0.0995 else f"{seconds * 1e3:.0f}"
