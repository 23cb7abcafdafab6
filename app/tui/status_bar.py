"""The line at the top: which model, which session, how fast, and how full the context is. Always visible."""

from textual.content import Content
from textual.widget import Widget

from app.tui.decode.speed import rate_text
from app.tui.figures import LiveFigures

_METER = 10
_NEARLY_FULL = 0.85


class StatusBar(Widget):
    """Drawn from plain values; `tell` sets them."""

    def __init__(self, figures: LiveFigures, id: str | None = None) -> None:
        super().__init__(id=id)
        self._figures = figures
        self._model = self._title = ""
        self._tokens = 0
        self._limit: int | None = None
        self._drawn: tuple[object, ...] = ()

    def tell(self, model: str, title: str, tokens: int, limit: int | None) -> None:
        """New values; draws only if something is different."""
        now = (model, title, tokens, limit, rate_text(self._figures.rate_now), self._figures.phase)
        if now != self._drawn:
            self._drawn = now
            self._model, self._title, self._tokens, self._limit = model, title, tokens, limit
            self.refresh()

    def render(self) -> Content:
        width = self.content_size.width
        right = self._right(width)
        left = self._left(width - right.cell_length - 2)
        return Content.assemble(left, " " * max(1, width - left.cell_length - right.cell_length), right)

    def _left(self, room: int) -> Content:
        parts: list[Content | tuple[str, str]] = [("▚ headrace", "bold $text-primary")]
        if self._model:
            parts += [("  ", ""), (self._model, "bold")]
        if self._title:
            parts += [("  ", ""), (self._title, "$quiet")]
        return Content.assemble(*parts).truncate(max(0, room), ellipsis=True)

    def _right(self, width: int) -> Content:
        speed = Content("")
        if self._figures.steps:
            share = f" MBU {self._figures.mbu:.0%}" if self._figures.mbu is not None else ""
            rate = rate_text(self._figures.rate_now)
            speed = Content.assemble((f"{rate} tok/s", "bold"), (share, "$quiet"), "   ")
        meter = context_meter(self._tokens, self._limit)
        return Content.assemble(speed, meter) if width >= 70 else meter


def context_meter(tokens: int, limit: int | None) -> Content:
    """`context ▕███───▏ 812 / 8,192`; a mark and bold where it is nearly full."""
    if not limit:
        return Content.styled("context –", "$quiet")
    share = tokens / limit
    full = share >= _NEARLY_FULL
    style = "bold $text-warning" if full else "$text-primary"
    cells = min(_METER, round(share * _METER) or (1 if tokens else 0))
    return Content.assemble(
        ("▲ " if full else "", style),
        ("context ", "$quiet"),
        ("━" * cells, style),
        ("─" * (_METER - cells), "$foreground 25%"),
        (f" {tokens:,}", "bold" if full else ""),
        (f" / {limit:,}", "$quiet"),
    )
