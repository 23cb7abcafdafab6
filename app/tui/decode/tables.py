"""Tables of the decode view: a row for each parallel answer, and one for each answer of the conversation."""

from collections.abc import Sequence

from textual.content import Content

from headrace.app.answer.phrases import mbu_text
from headrace.app.output.sanitise import sanitise
from headrace.app.tui.metrics.answers import OVER, Row, RowPhase, TurnAnswers
from headrace.app.tui.metrics.facts import Turn
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.widgets.lines import Section, fitting, legend, segments
from headrace.runtime.metrics.telemetry import PoolStats
from headrace.runtime.metrics.units import format_bytes, format_seconds, percent, three_digits

_SEQUENCES = (("", 3), ("state", 10), ("tokens", 7), ("tok/s", 7), ("cached", 7))
_TURNS = (
    ("turn", 4),
    ("prompt", 7),
    ("cached", 7),
    ("TTFT", 8),
    ("tok/s", 7),
    ("MBU", 6),
    ("tokens", 7),
    ("end", 11),
)
_EIGHTHS = "▁▂▃▄▅▆▇█"
_HITS_SHOWN = 12  # answers whose prefix hits matter more than words
_LEAST_ROWS = 2  # of the answers of a server
_LEAST_WORDS = 8  # cells of last words that are worth showing
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
    """State, tokens, speed, cached prompt tokens and last words of each parallel answer; below, the shared blocks."""

    TITLE = "sequences"
    NAME = "sequences"
    LEAST = 7
    MOST = 14

    def applies(self, metrics: LiveMetrics) -> bool:
        return metrics.answers.is_several

    def lines(self, metrics: LiveMetrics, width: int, height: int) -> Sequence[Content]:
        batch = metrics.answers
        if not batch.is_several:
            return []
        columns = _fitting(_SEQUENCES, width)
        head = "".join(f"{name:<{cells}}" if n < 2 else f"{name:>{cells}}" for n, (name, cells) in enumerate(columns))
        used = sum(cells for _, cells in columns)
        words = width - used - 2 if len(columns) == len(_SEQUENCES) and width - used - 2 >= _LEAST_WORDS else 0
        foot = [*_shared(batch, width), *_prefix_hits(metrics.turns, width)]
        if batch.is_endless:  # of more answers than there is room for: the pool and the hits matter more
            foot = foot[-max(1, height - 1 - _LEAST_ROWS) :]
            rows = sorted(batch.rows, key=lambda row: (row.phase in OVER, -row.number if row.phase in OVER else 0))
        else:
            foot = foot[: max(0, height - 1 - len(batch.rows))]
            rows = batch.rows
        shown = rows[: height - 1 - len(foot)]
        self.set_subtitle("" if len(shown) == len(rows) else f"{len(shown)} of {len(rows)} answers")
        lines = [_sequence(row, columns, words) for row in shown]
        return [Content.styled(head + "  last words" * (words > 0), "$quiet"), *lines, *foot]


def _sequence(row: Row, columns: Sequence[tuple[str, int]], words: int) -> Content:
    read = percent(row.prefill_done / row.prefill_total) if row.prefill_total else ""
    count = read if row.phase == "prefill" else f"{row.tokens:,}"
    cells = [f"{row.number}", _WORDS[row.phase], count, three_digits(row.totals.tokens_per_second), f"{row.reused:,}"]
    text = "".join(
        f"{cell:<{room}}" if n < 2 else f"{cell:>{room}}"
        for n, (cell, (_, room)) in enumerate(zip(cells, columns, strict=False))
    )
    if row.phase == "decode":
        style = "$text-accent"
    elif row.phase == "failed":
        style = "$text-error"
    else:
        style = ""
    line = Content.styled(text, "$quiet" if row.phase in OVER and row.phase != "failed" else style)
    content = Content(" ".join(sanitise(row.words).split())) if words else Content("")
    while content.cell_length > words:
        content = content[max(1, (content.cell_length - words) // 2) :]
    return Content.assemble(line, "  ", content) if words else line


def _shared(batch: TurnAnswers, width: int) -> list[Content]:
    """Return the weights of a token, and the blocks of the K/V pool."""
    lines = []
    if (each := batch.weight_bytes_per_token) is not None:
        size = format_bytes(round(each))
        whole = format_bytes(batch.weight_bytes)
        now = f", {batch.batches[-1]} sequences in the last" if batch.batches else ""
        pieces = [Content.styled(text, "$quiet") for text in (f"weights {size} a token", f"{whole} a step{now}")]
        lines.append(fitting(pieces, width))
    room = f"{format_bytes(batch.kv_used_bytes)} of {format_bytes(batch.kv_room_bytes)} K/V reserved"
    if (blocks := batch.blocks) is None:
        return [*lines, fitting([Content.styled(room, "$quiet")], width)]
    named = zip(_block_counts(blocks), ("own", "shared", "cached", "free"), strict=True)
    counts = sorted((count, name, mark, style) for (count, mark, style), name in named if count)[::-1]
    pieces = [Content.assemble((mark, style), (f" {count:,} {name}", "$quiet")) for count, name, mark, style in counts]

    def rest(shown: int) -> Content:
        return Content.styled(f"+ {sum(count for count, *_ in counts[shown:]):,} others", "$quiet")

    head = Content.styled("blocks ", "$quiet")
    counted = legend(pieces, rest, max(1, width - len(head)), max_lines=1) or [Content("0")]
    named_blocks = Content.assemble(head, counted[0])
    return [*lines, fitting([named_blocks, Content.styled(room, "$quiet")], width), _block_grid(blocks, width)]


def _block_counts(blocks: PoolStats) -> Sequence[tuple[int, str, str]]:
    """Return count, character and style of blocks: used by one sequence, shared, cached for later prompts, free."""
    return (
        (blocks.used - blocks.shared, "█", "$primary"),
        (blocks.shared, "▓", "$secondary"),
        (blocks.cached, "▒", "$accent"),
        (blocks.free, "·", "$foreground 60%"),
    )


def _block_grid(blocks: PoolStats, width: int) -> Content:
    """Return a line of the pool's blocks by state, each in one cell, or several in one where they do not fit."""
    counts = _block_counts(blocks)
    total = sum(count for count, _, _ in counts)
    return segments(counts, min(width, total))


def _prefix_hits(turns: Sequence[Turn], width: int) -> list[Content]:
    """Return the part of the prompts' tokens that was cached, and that of each of the newest answers as a bar."""
    known = [turn for turn in turns if turn.prompt_tokens]
    if not known:
        return []
    cached = sum(turn.reused_tokens for turn in known) / sum(turn.prompt_tokens for turn in known)
    short = f"prefix hits {percent(cached)}  "
    text = f"prefix hits {percent(cached)} of the prompt tokens of {len(known)} answers  "
    if len(text) + min(len(known), _HITS_SHOWN) > width:
        text = short
    shares = [turn.reused_tokens / turn.prompt_tokens for turn in known[-max(0, width - len(text)) :]]
    marks = "".join(_EIGHTHS[round(min(1.0, share) * (len(_EIGHTHS) - 1))] for share in shares)
    return [Content.assemble((text, "$quiet"), (marks, "$primary")).truncate(width)]


class TurnsSection(Section):
    """Newest last; columns that do not fit are dropped from the right."""

    TITLE = "answers"
    NAME = "turns"
    LEAST = 5
    MOST = 14

    def applies(self, metrics: LiveMetrics) -> bool:
        return bool(metrics.turns) or metrics.running is not None

    def change_key(self, metrics: LiveMetrics) -> object:
        last = tuple(metrics.turns[-1:])
        return id(metrics), last, len(metrics.turns), metrics.running

    def lines(self, metrics: LiveMetrics, width: int, height: int) -> Sequence[Content]:
        running = metrics.running
        turns = [*metrics.turns, running] if running else metrics.turns
        if not turns:
            return [Content.styled("no answers yet", "$faint")]
        columns = _fitting(_TURNS, width)
        rows = [Content.styled("".join(f"{name:>{cells}}" for name, cells in columns), "$quiet")]
        shown = turns[-max(1, height - 1) :]
        for turn in shown:
            text = "".join(f"{cell:>{cells}}" for cell, (_, cells) in zip(_cells(turn), columns, strict=False))
            if turn is running:  # the mark stands in the first column, which is wider than its number
                text = "●" + text[1:]
                style = "$text-accent"
            else:
                style = "bold" if turn is shown[-1] else ""
            rows.append(Content.styled(text, style))
        return rows


def _cells(turn: Turn) -> tuple[str, ...]:
    return (
        str(turn.number),
        str(turn.prompt_tokens),
        str(turn.reused_tokens),
        format_seconds(turn.ttft_s),
        three_digits(turn.tokens_per_second),
        mbu_text(turn.mbu, busy=turn.busy),
        str(turn.completion_tokens),
        turn.finish_reason,
    )


def _fitting(columns: Sequence[tuple[str, int]], width: int) -> Sequence[tuple[str, int]]:
    """Return the first columns that fit."""
    shown = 0
    used = 0
    for _, cells in columns:
        if used + cells > width:
            break
        shown = shown + 1
        used = used + cells
    return columns[:shown]
