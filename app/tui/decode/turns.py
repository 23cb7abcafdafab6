"""Turn history: the metrics of each answer, also of the running one."""

from collections.abc import Sequence

from textual.content import Content

from headrace.app.answer.phrases import duration, mbu_text, rate_digits
from headrace.app.tui.metrics.facts import Turn
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.widgets.lines import Section

_COLUMNS = (
    ("turn", 4),
    ("prompt", 7),
    ("cached", 7),
    ("TTFT", 8),
    ("tok/s", 7),
    ("MBU", 6),
    ("tokens", 7),
    ("end", 11),
)


class TurnsSection(Section):
    """Newest last; columns that do not fit are dropped from the right."""

    TITLE = "turns"

    def change_key(self, metrics: LiveMetrics) -> object:
        last = tuple(metrics.turns[-1:])
        return id(metrics), last, len(metrics.turns), metrics.running

    def lines(self, metrics: LiveMetrics, width: int, height: int) -> Sequence[Content]:
        running = metrics.running
        turns = [*metrics.turns, running] if running else metrics.turns
        if not turns:
            return [Content.styled("no answers yet", "$faint")]
        shown, used = 0, 0
        for _, cells in _COLUMNS:
            if used + cells > width:
                break
            shown, used = shown + 1, used + cells
        head = "".join(f"{name:>{cells}}" for name, cells in _COLUMNS[:shown])
        rows = [Content.styled(head, "$quiet")]
        kept = turns[-max(1, height - 1) :]
        for turn in kept:
            text = "".join(f"{cell:>{cells}}" for cell, (_, cells) in zip(_cells(turn)[:shown], _COLUMNS, strict=False))
            if turn is running:  # the mark stands in the first column, which is wider than its number
                text = "●" + text[1:]
            rows.append(Content.styled(text, "$text-accent" if turn is running else "bold" if turn is kept[-1] else ""))
        return rows


def _cells(turn: Turn) -> tuple[str, ...]:
    return (
        str(turn.number),
        str(turn.prompt_tokens),
        str(turn.reused_tokens),
        duration(turn.ttft_s),
        rate_digits(turn.tokens_per_second),
        mbu_text(turn.mbu, busy=turn.busy),
        str(turn.completion_tokens),
        turn.finish_reason,
    )
