"""Status bar: model, session, speed and context.

`Status` is the part that is not in the metrics; `ChatState.status` makes it. Texts are shortened in the order of
`_left`: warnings and instructions are always visible.

Guard: tests/tui/test_parts.py.
"""

from collections.abc import Sequence

from msgspec import Struct
from rich.cells import cell_len
from textual.content import Content

from headrace.app.answer.phrases import mbu_text
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.widgets.lines import Lines
from headrace.runtime.metrics.units import three_digits

_METER = 10  # cells of the context's bar
_MARK = 3  # cells before the model's name
_GAP = 2  # cells between the two sides
_SPEED_FROM = 70  # cells of the bar from which it has the speed
_NEARLY_FULL = 0.85  # share of the context from which it has a mark
_LEAST_TITLE = 12  # cells of a title that are worth showing


class Status(Struct, frozen=True):
    """Sanitised texts.

    model: name; empty without one.
    title: of the session.
    tokens: in the context.
    limit: of the context, in tokens; None until a model is loaded.
    sampling: texts, longest first.
    marks: warnings, always visible.
    instructions: the preset or system prompt in force, always visible.
    """

    model: str = ""
    title: str = ""
    tokens: int = 0
    limit: int | None = None
    sampling: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    instructions: str = ""


class StatusBar(Lines):
    """`set_status` sets the part that is not in the metrics."""

    def __init__(self, metrics: LiveMetrics, id: str | None = None) -> None:
        super().__init__(metrics, id)
        self._status = Status()
        self._with_speed = True

    def set_status(self, status: Status, *, with_speed: bool) -> None:
        """Set the values; redraw if they changed. with_speed: nothing else on the screen shows the speed."""
        self._status = status
        self._with_speed = with_speed
        self.show(self.metrics)

    def change_key(self, metrics: LiveMetrics) -> object:
        return (
            self._status,
            self._with_speed,
            three_digits(metrics.rate_average),
            metrics.phase,
            metrics.machine,
            metrics.busy,
        )

    def lines(self, metrics: LiveMetrics, width: int, height: int) -> Sequence[Content]:  # noqa: ARG002
        right = self._right(width)
        if cell_len(self._status.model) + _MARK > width - right.cell_length - _GAP:
            right = context_meter(self._status.tokens, self._status.limit, with_bar=False)
        left = self._left(width - right.cell_length - _GAP)
        return [Content.assemble(left, " " * max(1, width - left.cell_length - right.cell_length), right)]

    def _left(self, room: int) -> Content:
        """Return model, sampling, title: the model before the program's name, both before a short title."""
        name = Content.styled("▚ headrace", "bold $text-primary")
        if not self._status.model:
            return name.truncate(max(0, room), ellipsis=True)
        model = Content.styled(f"  {self._status.model}", "bold")
        short = Content.styled("▚", "bold $text-primary")
        marks = [Content.styled(f" ▲ {mark}", "bold $text-warning") for mark in self._status.marks]
        if self._status.instructions:
            marks.append(Content.styled(f" ✎ {self._status.instructions}", "$text-accent"))
        marked = Content("").join(marks)
        parts = [Content.styled(f" {text}", "$quiet") for text in self._status.sampling]
        # From the longest to the shortest: with the program's name, without it, without the sampling.
        forms = [head + model + marked + how for head in (name, short) for how in parts]
        forms += [name + model + marked, short + model + marked]
        least = short + model.truncate(max(0, room - 1 - marked.cell_length), ellipsis=True) + marked
        left = next((form for form in forms if form.cell_length <= room), least)
        if self._status.title and room - left.cell_length >= _LEAST_TITLE:
            left += Content.styled(f"  {self._status.title}", "$quiet")
        return left.truncate(max(0, room), ellipsis=True)

    def _right(self, width: int) -> Content:
        """Return the context's meter; before it speed and MBU, if nothing else shows them and there is room."""
        metrics = self.metrics
        meter = context_meter(self._status.tokens, self._status.limit)
        has_steps = metrics.answer.records or metrics.answers.is_several
        if width < _SPEED_FROM or not self._with_speed or not has_steps:
            return meter
        share = ""
        if metrics.busy or metrics.mbu_average is not None:
            share = f" MBU {mbu_text(metrics.mbu_average, busy=metrics.busy)}"
        rate = three_digits(metrics.rate_average)
        return Content.assemble((f"{rate} tok/s", "bold"), (share, "$quiet"), "   ", meter)


def context_meter(tokens: int, limit: int | None, *, with_bar: bool = True) -> Content:
    """Return `context ━━───── 812 / 8,192`; bold with a mark if it is nearly full."""
    if not limit:
        return Content.styled("context –", "$quiet")
    share = tokens / limit
    mark = ""
    style = "$text-primary"
    count_style = ""
    if share >= _NEARLY_FULL:
        mark = "▲ "
        style = "bold $text-warning"
        count_style = "bold"
    bar = Content("")
    if with_bar:
        cells = min(_METER, max(min(1, tokens), round(share * _METER)))
        bar = Content.assemble(("━" * cells, style), ("─" * (_METER - cells), "$foreground 25%"), " ")
    return Content.assemble(
        (mark, style), ("context ", "$quiet"), bar, (f"{tokens:,}", count_style), (f" / {limit:,}", "$quiet")
    )
