"""Answers that grow side by side: a row each."""

from collections.abc import Sequence

from textual.content import Content

from headrace.app.answer_phrases import rate_digits
from headrace.app.tui.decode.batch_metrics import OVER, Row
from headrace.app.tui.decode.metrics import LiveMetrics
from headrace.app.tui.decode.section import Section

_COLUMNS = (("", 3), ("phase", 11), ("tokens", 8), ("tok/s", 8), ("p50 ms", 8), ("p95 ms", 8), ("max", 8))
_MARKS = {"decode": "●", "prefill": "◌", "waiting": "…", "preempted": "⧗", "done": "✓", "stopped": "■", "failed": "✗"}


class SequencesSection(Section):
    """Phase, tokens, speed and ITL of each; columns that do not fit are left out from the right."""

    TITLE = "sequences"

    def news(self, metrics: LiveMetrics) -> object:
        return None if metrics.batch is None else (id(metrics), metrics.version)

    def lines(self, metrics: LiveMetrics, width: int, height: int) -> Sequence[Content]:  # noqa: ARG002
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
        return [Content.styled(head, "$quiet"), *(_line(row, shown) for row in metrics.batch.rows)]


def _line(row: Row, shown: int) -> Content:
    itl = row.itl
    figures = [_milliseconds(value) for value in (itl.p50, itl.p95, itl.max)] if itl else ["–"] * 3
    tokens = f"{row.prefill_done}/{row.prefill_total}" if row.phase == "prefill" else f"{row.tokens:,}"
    cells = [f"{row.number}", f"{_MARKS[row.phase]} {row.phase}", tokens, rate_digits(row.tokens_per_second), *figures]
    text = "".join(
        f"{cell:<{room}}" if n < 2 else f"{cell:>{room}}"
        for n, (cell, (_, room)) in enumerate(zip(cells[:shown], _COLUMNS, strict=False))
    )
    style = "$text-accent" if row.phase == "decode" else "$text-error" if row.phase == "failed" else ""
    return Content.styled(text, "$quiet" if row.phase in OVER and row.phase != "failed" else style)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if seconds < 0.0995 else f"{seconds * 1e3:.0f}"
