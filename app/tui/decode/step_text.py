"""The text of an answer around one step, and that step's record.

Slow steps have the colours of the latency chart. Accepted draft tokens are green and underlined, rejected ones struck
through. `⏎` is a line break, `·` a step without text of its own: part of a character, or the end of the answer.

`LatencySection` shows both below its chart in F2. Steps have an index in the answer; records are kept for the newest
ones only, so an index there is `index - first`. tests/tui/decode/test_step_text.py guards this.
"""

from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from textual.content import Content

from headrace.app.answer.answer_steps import FAR, NEAR, StepText, nearness
from headrace.app.output.sanitise import Sanitiser, sanitise
from headrace.app.tui.widgets.lines import ACCEPTED, REJECTED, fitting
from headrace.runtime.metrics.telemetry import StepRecord
from headrace.runtime.metrics.units import format_bytes, format_seconds

SLOW = ("", "$text-warning", "$text-error")
"""Styles of texts by `nearness` to the median."""

_NO_TEXT = "·"

StyledPiece = tuple[str, str]
"""Text and its style."""


class TokenLines:
    """Lines of an answer's text, broken between steps; `update` lays out new steps only."""

    def __init__(self) -> None:
        self.starts = [0]
        """The first step of each line."""
        self._texts: Sequence[StepText] = ()  # the answer that is laid out
        self._width = 0
        self._used = 0  # cells of the last line
        self._done = 0  # steps that are laid out

    def update(self, texts: Sequence[StepText], width: int) -> None:
        """Lay out the steps of an answer at this width."""
        if texts is not self._texts or width != self._width:
            self.starts = [0]
            self._texts = texts
            self._width = width
            self._used = 0
            self._done = 0
        for index in range(self._done, len(texts)):
            cells = sum(cell_len(_visible(text)) for text in (*texts[index].pieces, *texts[index].rejected))
            if self._used and self._used + cells > width:
                self.starts.append(index)
                self._used = 0
            self._used += cells
        self._done = len(texts)

    def around(self, step: int, count: int) -> list[range]:
        """Return the steps of at most `count` lines, with the line of `step` in the middle where others follow."""
        line = max(index for index, start in enumerate(self.starts) if start <= step)
        first = max(0, min(line - count // 2, len(self.starts) - count))
        ends = [*self.starts[1:], self._done]
        return [range(self.starts[n], ends[n]) for n in range(first, min(first + count, len(ends)))]


class StepTexts:
    """Kept steps with the texts of all."""

    def __init__(
        self, steps: Sequence[StepRecord], texts: Sequence[StepText], p50_s: float, cursor: int | None
    ) -> None:
        """Take the steps to show.

        steps: those whose records are kept.
        texts: of all steps of the answer.
        p50_s: the latency that others are compared with.
        cursor: index of the marked step among `steps`; None: none is marked.
        """
        self._steps = steps
        self._texts = texts
        self._p50_s = p50_s
        self._cursor = cursor
        self._first = steps[0].index

    def lines(self, layout: TokenLines, width: int, count: int) -> list[Content]:
        """Return `count` lines with the marked step, or with the newest one."""
        layout.update(self._texts, width)
        focus = self._steps[-1]
        if self._cursor is not None:
            focus = self._steps[self._cursor]
        shown = [self._line(steps).truncate(width) for steps in layout.around(focus.index, count)]
        return [*shown, *[Content("")] * (count - len(shown))]

    def _line(self, steps: range) -> Content:
        """Return the text of steps, numbered as their records are."""
        safe = Sanitiser()
        return Content.assemble(*(piece for step in steps for piece in self._pieces(step, safe)))

    def _pieces(self, index: int, safe: Sanitiser) -> Iterator[StyledPiece]:
        """Yield the texts of a step: accepted and rejected draft tokens, then the token that the model chose.

        index: of the step in the answer.
        safe: sanitises the line's text from piece to piece, as a sequence may be cut by tokens.
        """
        position = index - self._first  # of its record among those kept; negative if it is no longer kept
        pieces, accepted, rejected = self._texts[index]
        mark = ""
        if position == self._cursor:
            mark = " bold reverse"
            if not any(pieces):
                pieces = (_NO_TEXT,)
                accepted = 0
        yield _visible(safe.feed("".join(pieces[:accepted]))), ACCEPTED + mark
        yield _visible(sanitise("".join(rejected))), REJECTED
        slow = ""
        if 0 <= position < len(self._steps) and index > 0:  # the first token has no latency of its own
            slow = SLOW[nearness(self._steps[position].latency_s, self._p50_s)]
        yield _visible(safe.feed("".join(pieces[accepted:]))), (slow + mark).strip()


def record_line(record: StepRecord, text: StepText | None, width: int) -> Content:
    """Return the record of a step as a line, as much as fits. text: None if it is not known."""
    if text is None:
        words = ""
    elif text.text:
        words = f" “{_visible(sanitise(text.text))}”"
    else:
        words = " no text"
    facts = [
        ("", format_seconds(record.latency_s)),
        ("context ", f"{record.context:,}"),
        ("", f"{record.achieved_gb_s:.1f} GB/s"),
        ("K/V ", f"{format_bytes(record.kv_bytes_read)} of {format_bytes(record.step_bytes)}"),
    ]
    if record.proposed:
        facts.insert(1, ("", f"{record.accepted} of {record.proposed} drafts taken"))
    if record.fed:
        facts.insert(1, ("prefill ", f"{record.fed:,} tokens"))
    head = Content.assemble((f"step {record.index}", "bold $text-accent"), words)
    return fitting([head, *(Content.assemble((name, "$quiet"), value) for name, value in facts)], width)


def text_legend(*, has_drafts: bool) -> Content:
    """Return the meaning of the colours of text and bars."""
    drafts = []
    if has_drafts:
        drafts = [("■", "$text-success"), (" draft taken  ", "$quiet")]
    _, over_near, over_far = SLOW
    return Content.assemble(
        *drafts,
        ("■", over_near), (f" over {NEAR:g} p50  ", "$quiet"),
        ("■", over_far), (f" over {FAR:g} p50", "$quiet"),
    )  # fmt: skip


def _visible(text: str) -> str:
    return text.replace("\n", "⏎").replace("\t", "⇥")
