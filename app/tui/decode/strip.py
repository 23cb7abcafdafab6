"""The answer's tokens: a cell each, coloured by latency, the text around one step, and that step's record.

The height of a cell is the token's part of its step's latency; half height is the median. Accepted draft tokens are
green and underlined, rejected ones struck through in the text. `⏎` is a line break, `·` a step without text of its own:
part of a character, or the end of the answer.
"""

from collections.abc import Iterator, Sequence
from statistics import median

from rich.cells import cell_len
from textual.content import Content

from headrace.app.answer.answer_steps import StepText
from headrace.app.output.sanitise import Sanitiser, sanitise
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.widgets.lines import Section, fitting
from headrace.runtime.metrics.telemetry import StepRecord
from headrace.runtime.metrics.units import format_bytes, format_seconds

_LEVELS = "▁▂▃▄▅▆▇█"
_USUAL = 4  # levels of the median
_SLOW, _SLOWEST = 1.25, 2.0  # times the median
_MOST = 8.0
_FRAME_FROM, _HIGHEST = 30, 8  # lines of a window from which there is a frame; of the strip with it
_MEDIAN_OF = 256  # newest steps
_ACCEPTED = "underline $text-success"
_REJECTED = "strike $text-error"
_NO_TEXT = "·"

Piece = tuple[str, str]
"""Text and its style."""


class TokenLines:
    """Lines of an answer's text, broken between steps; `update` lays out new steps only."""

    def __init__(self) -> None:
        self.starts = [0]
        """The first step of each line."""
        self._of: Sequence[StepText] = ()
        self._width = self._used = self._done = 0

    def update(self, texts: Sequence[StepText], width: int) -> None:
        """Lay out the steps of an answer at this width."""
        if texts is not self._of or width != self._width:
            self.starts = [0]
            self._of = texts
            self._width = width
            self._used = 0
            self._done = 0
        for place in range(self._done, len(texts)):
            cells = sum(cell_len(_visible(text)) for text in (*texts[place].pieces, *texts[place].rejected))
            if self._used and self._used + cells > width:
                self.starts.append(place)
                self._used = 0
            self._used += cells
        self._done = len(texts)

    def around(self, step: int, count: int) -> list[range]:
        """Return the steps of at most `count` lines, with the line of `step` in the middle where others follow."""
        line = max(place for place, start in enumerate(self.starts) if start <= step)
        first = max(0, min(line - count // 2, len(self.starts) - count))
        ends = [*self.starts[1:], self._done]
        return [range(self.starts[n], ends[n]) for n in range(first, min(first + count, len(ends)))]


class StripSection(Section):
    """cursor: the step that is shown, steps back from the newest; None: the newest, and no mark."""

    TITLE = "tokens"
    NAME = "tokens"

    def __init__(self, metrics: LiveMetrics, id: str | None = None) -> None:
        super().__init__(metrics, id)
        self.cursor: int | None = None
        self._lines_of_text = TokenLines()

    def applies(self, metrics: LiveMetrics) -> bool:
        """Return whether there is something to show: the tokens of an answer, or soon those of the next one."""
        return metrics.batch is None and bool(metrics.turns or metrics.texts)

    def fit(self, window: int) -> None:
        """Take the height that fits into a window of `window` lines; a small one has no room for a frame."""
        self.set_class(window < _FRAME_FROM, "-bare")
        self.styles.height = 3 if window < _FRAME_FROM else min(_HIGHEST, window // 8 + 1)

    def point_at(self, back: int | None) -> None:
        """Show a step, so many steps back from the newest."""
        if back != self.cursor:
            self.cursor = back
            self.redraw()

    def lines(self, metrics: LiveMetrics, width: int, height: int) -> Sequence[Content]:
        steps = list(metrics.steps)
        texts = metrics.texts
        if not steps or not texts:
            return [Content.styled("no tokens yet", "$faint")]
        shown = _ShownSteps(steps, texts, None if self.cursor is None else max(0, len(steps) - 1 - self.cursor))
        rows = max(1, height - 2)
        self._lines_of_text.update(texts, width)
        focus = steps[shown.focus].index
        text = [shown.line(line).truncate(width) for line in self._lines_of_text.around(focus, rows)]
        return [shown.strip(width), *text, *[Content("")] * (rows - len(text)), shown.record(width)][:height]


class _ShownSteps:
    """Kept steps with the texts of all. cursor: place of the marked step; None: none is."""

    def __init__(self, steps: Sequence[StepRecord], texts: Sequence[StepText], cursor: int | None) -> None:
        self._steps = steps
        self._texts = texts
        self._cursor = cursor
        self.focus = len(steps) - 1 if cursor is None else cursor
        self._first = steps[0].index
        latencies = [step.latency_s / step.tokens for step in steps[-_MEDIAN_OF:] if step.index]
        self._usual_s = median(latencies) if latencies else 0.0

    def strip(self, width: int) -> Content:
        """Return `width` cells of tokens: the newest at the right, or those around the marked step."""
        last = len(self._steps)
        if self._cursor is not None and sum(map(self._count, range(self._cursor, last))) > width:
            last = self._cursor + 1
            room = width // 2
            while last < len(self._steps) and self._count(last) <= room:
                room -= self._count(last)
                last += 1
        pieces = list[Piece]()
        room = width
        for place in range(last - 1, -1, -1):
            mark = " reverse" * (place == self._cursor)
            count = self._count(place)
            accepted = self._text(place).accepted
            cells = (_LEVELS[self._level(place)] * count)[-room:]
            left = max(0, accepted - (count - len(cells)))
            pieces += [(cells[left:], ("$primary", "$warning", "$error")[self._speed(place)] + mark)]
            pieces += [(cells[:left], "$success" + mark)]
            room -= len(cells)
            if room <= 0:
                break
        return Content.assemble(" " * room, *reversed(pieces))

    def line(self, steps: range) -> Content:
        """Return the text of steps, numbered as their records are."""
        safe = Sanitiser()
        return Content.assemble(*(piece for step in steps for piece in self._pieces(step, safe)))

    def record(self, width: int) -> Content:
        """Return the record of the step in focus as a line."""
        record = self._steps[self.focus]
        text = self._text(self.focus).text
        facts = [
            ("", format_seconds(record.latency_s)),
            ("context ", f"{record.context:,}"),
            ("", f"{record.achieved_gb_s:.1f} GB/s"),
            ("K/V ", f"{format_bytes(record.kv_bytes_read)} of {format_bytes(record.step_bytes)}"),
        ]
        if record.proposed:
            facts.insert(1, ("drafts ", f"{record.accepted} of {record.proposed} accepted"))
        word = f" “{_visible(sanitise(text))}”" if text else " no text"
        pieces = [Content.assemble((f"step {record.index}", "bold $text-accent"), word)]
        return fitting([*pieces, *(Content.assemble((name, "$quiet"), value) for name, value in facts)], width)

    def _pieces(self, index: int, safe: Sanitiser) -> Iterator[Piece]:
        """Yield the texts of a step: accepted and rejected draft tokens, then the token that the model chose."""
        place, (pieces, accepted, rejected) = index - self._first, self._texts[index]
        marked = place == self._cursor
        mark = " bold reverse" * marked
        if marked and not any(pieces):
            pieces = (_NO_TEXT,)
            accepted = 0
        yield _visible(safe.feed("".join(pieces[:accepted]))), _ACCEPTED + mark
        yield _visible(sanitise("".join(rejected))), _REJECTED
        slow = ("", "$text-warning", "$text-error")[self._speed(place)] if place >= 0 else ""
        yield _visible(safe.feed("".join(pieces[accepted:]))), (slow + mark).strip()

    def _text(self, place: int) -> StepText:
        index = self._first + place
        return self._texts[index] if index < len(self._texts) else StepText(("",))

    def _count(self, place: int) -> int:
        """Return the cells of a step: one for each of its tokens."""
        return max(1, len(self._text(place).pieces))

    def _ratio(self, place: int) -> float:
        """Return the latency of a step's tokens, relative to the median, at most _MOST."""
        if place >= len(self._steps) or not self._usual_s:  # its record is not there yet
            return 1.0
        return min(_MOST, self._steps[place].latency_s / self._steps[place].tokens / self._usual_s)

    def _level(self, place: int) -> int:
        return min(len(_LEVELS) - 1, max(0, round(self._ratio(place) * _USUAL) - 1))

    def _speed(self, place: int) -> int:
        """Return 0 for a usual latency, 1 for a slow one, 2 for a very slow one."""
        ratio = self._ratio(place)
        return 0 if ratio <= _SLOW else 1 if ratio <= _SLOWEST else 2


def _visible(text: str) -> str:
    return text.replace("\n", "⏎").replace("\t", "⇥")
