"""Tables of the decode view: a row for each parallel answer, and one for each answer of the conversation.

A new column is a name with its width in `_SEQUENCES` or `_TURNS`, and a cell in the same place of `_sequence` or
`_cells`. Columns are dropped from the right where they do not fit.

Guard: tests/tui/test_several_metrics.py.
"""

from collections.abc import Sequence
from itertools import accumulate

from textual.content import Content

from headrace.app.answer.phrases import mbu_text
from headrace.app.output.sanitise import safe_line
from headrace.app.tui.metrics.answers import OVER, AnswerRow, RowPhase, TurnAnswers
from headrace.app.tui.metrics.facts import TurnFigures
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.widgets.lines import Section, first_that_fits, fitting, legend, segments
from headrace.runtime.metrics.telemetry import PoolStats
from headrace.runtime.metrics.units import format_bytes, format_seconds, percent, three_digits

# Columns: name and width in cells. The cells of a row, in `_sequence` and `_cells`, have the same order.
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
_LEAST_ROWS = 2  # rows of answers that stay in an endless turn, where the foot comes first
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
_ROW_STYLES: dict[RowPhase, str] = {
    "decode": "$text-accent",
    "failed": "$text-error",
    "done": "$quiet",
    "stopped": "$quiet",
}


class SequencesSection(Section):
    """State, tokens, speed, cached prompt tokens and last words of each parallel answer; below, the shared blocks."""

    TITLE = "sequences"
    NAME = "sequences"
    MIN_LINES = 7
    MAX_LINES = 14

    def applies(self, metrics: LiveMetrics) -> bool:
        return metrics.answers.is_several

    def lines(self, metrics: LiveMetrics, width: int, height: int) -> Sequence[Content]:
        batch = metrics.answers
        if not batch.is_several:
            return []
        columns = _fitting(_SEQUENCES, width)
        words = 0  # cells of the last words
        if len(columns) == len(_SEQUENCES):
            words = width - sum(cells for _, cells in columns) - 2  # two spaces stand before them
            if words < _LEAST_WORDS:
                words = 0
        foot = [*_shared(batch, width), *_prefix_hits(metrics.turns, width)]
        if batch.is_endless:  # of more answers than there is room for: the pool and the hits matter more
            foot = foot[-max(1, height - 1 - _LEAST_ROWS) :]
            over = [row for row in batch.rows if row.phase in OVER]
            newest_first = sorted(over, key=lambda row: -row.number)
            rows = [*(row for row in batch.rows if row.phase not in OVER), *newest_first]
        else:
            foot = foot[: max(0, height - 1 - len(batch.rows))]
            rows = batch.rows
        shown = rows[: height - 1 - len(foot)]
        subtitle = ""
        if len(shown) < len(rows):
            subtitle = f"{len(shown)} of {len(rows)} answers"
        self.set_subtitle(subtitle)
        head = _cells_text([name for name, _ in columns], columns)
        if words:
            head += "  last words"
        return [Content.styled(head, "$quiet"), *(_sequence(row, columns, words) for row in shown), *foot]


def _cells_text(cells: Sequence[str], columns: Sequence[tuple[str, int]]) -> str:
    """Return the cells of a line that have a column; the first two columns are texts, the others numbers.

    There may be fewer columns than cells: a narrow panel has only the first ones.
    """
    text = ""
    for index, (cell, (_, room)) in enumerate(zip(cells, columns, strict=False)):
        text += cell.ljust(room) if index < 2 else cell.rjust(room)
    return text


def _sequence(row: AnswerRow, columns: Sequence[tuple[str, int]], words: int) -> Content:
    """Return the line of an answer. words: cells of its last words; 0: without them."""
    if row.phase != "prefill":
        count = f"{row.tokens:,}"
    elif row.prefill_total:  # no output yet: the share of the prompt that is computed
        count = percent(row.prefill_done / row.prefill_total)
    else:
        count = ""
    cells = [f"{row.number}", _WORDS[row.phase], count, three_digits(row.totals.tokens_per_second), f"{row.reused:,}"]
    line = Content.styled(_cells_text(cells, columns), _ROW_STYLES.get(row.phase, ""))
    if not words:
        return line
    content = Content(safe_line(row.words))
    # A character has one or two cells: half the excess at a time, so that no more is cut off than has to be.
    while content.cell_length > words:
        content = content[max(1, (content.cell_length - words) // 2) :]
    return Content.assemble(line, "  ", content)


def _shared(batch: TurnAnswers, width: int) -> list[Content]:
    """Return the weights of a token, and the blocks of the K/V pool."""
    lines = []
    if batch.weight_bytes_per_token is not None:
        step = f"{format_bytes(batch.weight_bytes)} a step"
        if batch.batches:
            step += f", {batch.batches[-1]} sequences in the last"
        token = f"weights {format_bytes(round(batch.weight_bytes_per_token))} a token"
        lines.append(fitting([Content.styled(token, "$quiet"), Content.styled(step, "$quiet")], width))
    room = f"{format_bytes(batch.kv_used_bytes)} of {format_bytes(batch.kv_room_bytes)} K/V reserved"
    if (blocks := batch.blocks) is None:
        return [*lines, fitting([Content.styled(room, "$quiet")], width)]
    named = zip(_block_counts(blocks), ("own", "shared", "cached", "free"), strict=True)
    # Largest first: the legend puts together those that do not fit.
    counts = sorted((count, name, mark, style) for (count, mark, style), name in named if count)[::-1]
    pieces = [Content.assemble((mark, style), (f" {count:,} {name}", "$quiet")) for count, name, mark, style in counts]

    def rest(shown: int) -> Content:
        return Content.styled(f"+ {sum(count for count, *_ in counts[shown:]):,} others", "$quiet")

    head = Content.styled("blocks ", "$quiet")
    counted = legend(pieces, rest, max(1, width - len(head)), max_lines=1) or [Content("0")]
    named_blocks = Content.assemble(head, counted[0])
    grid = segments(_block_counts(blocks), min(width, blocks.total))
    return [*lines, fitting([named_blocks, Content.styled(room, "$quiet")], width), grid]


def _block_counts(blocks: PoolStats) -> Sequence[tuple[int, str, str]]:
    """Return count, character and style of blocks: used by one sequence, shared, cached for later prompts, free.

    `_shared` names them in this order. The counts sum to `blocks.total`.
    """
    return (
        (blocks.used - blocks.shared, "█", "$primary"),  # `used` includes the shared ones
        (blocks.shared, "▓", "$secondary"),
        (blocks.cached, "▒", "$accent"),
        (blocks.free, "·", "$foreground 60%"),
    )


def _prefix_hits(turns: Sequence[TurnFigures], width: int) -> list[Content]:
    """Return the part of the prompts' tokens that was cached, and that of each of the newest answers as a bar."""
    known = [turn for turn in turns if turn.prompt_tokens]
    if not known:
        return []
    cached = sum(turn.reused_tokens for turn in known) / sum(turn.prompt_tokens for turn in known)
    hits = f"prefix hits {percent(cached)}"
    forms = (f"{hits} of the prompt tokens of {len(known)} answers  ", f"{hits}  ")
    text = first_that_fits(forms, width - min(len(known), _HITS_SHOWN))
    shares = [turn.reused_tokens / turn.prompt_tokens for turn in known[-max(0, width - len(text)) :]]
    marks = "".join(_EIGHTHS[round(min(1.0, share) * (len(_EIGHTHS) - 1))] for share in shares)
    return [Content.assemble((text, "$quiet"), (marks, "$primary")).truncate(width)]


class TurnsSection(Section):
    """A row for each answer of the conversation, newest last; the last columns are left out if they do not fit."""

    TITLE = "answers"
    NAME = "turns"
    MIN_LINES = 5
    MAX_LINES = 14

    def applies(self, metrics: LiveMetrics) -> bool:
        return bool(metrics.turns) or metrics.running is not None

    def change_key(self, metrics: LiveMetrics) -> object:
        # Not `version`, which also grows with events that leave the answers as they are.
        last = tuple(metrics.turns[-1:])
        return id(metrics), last, len(metrics.turns), metrics.running

    def lines(self, metrics: LiveMetrics, width: int, height: int) -> Sequence[Content]:
        running = metrics.running
        turns = list(metrics.turns)
        if running is not None:
            turns.append(running)
        if not turns:
            return [Content.styled("no answers yet", "$faint")]
        columns = _fitting(_TURNS, width)
        rows = [Content.styled("".join(f"{name:>{cells}}" for name, cells in columns), "$quiet")]
        shown = turns[-max(1, height - 1) :]
        for turn in shown:
            text = "".join(f"{cell:>{cells}}" for cell, (_, cells) in zip(_cells(turn), columns, strict=False))
            style = ""
            if turn is running:  # the mark stands in the first column, which is wider than its number
                text = "●" + text[1:]
                style = "$text-accent"
            elif turn is shown[-1]:
                style = "bold"
            rows.append(Content.styled(text, style))
        return rows


def _cells(turn: TurnFigures) -> tuple[str, ...]:
    """Return the cells of an answer, in the order of `_TURNS`."""
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
    ends = accumulate(cells for _, cells in columns)
    return [column for column, end in zip(columns, ends, strict=True) if end <= width]
