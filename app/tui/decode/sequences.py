"""Answers that grow side by side: a row each."""

from collections.abc import Sequence

from textual.content import Content

from headrace.app.answer_phrases import rate_digits
from headrace.app.tui.decode.batch_metrics import OVER, Row, RowPhase
from headrace.app.tui.decode.metrics import LiveMetrics
from headrace.app.tui.decode.section import Section

_COLUMNS = (("", 3), ("phase", 10), ("tokens", 7), ("tok/s", 7), ("p50 ms", 7), ("p95 ms", 7), ("max", 7))
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
