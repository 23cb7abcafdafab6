"""One framed part of the decode view: a title, and lines drawn from the figures at whatever size it has."""

from collections.abc import Sequence

from textual.content import Content
from textual.widget import Widget

from app.tui.figures import LiveFigures

Piece = str | tuple[str, str]
"""Text, or text and its style."""


class Section(Widget):
    """Draws `lines(figures, width, height)`; redraws when told that the figures changed."""

    TITLE = ""
    can_focus = False

    def __init__(self, figures: LiveFigures, id: str | None = None) -> None:
        super().__init__(id=id)
        self.figures = figures
        self.border_title = self.TITLE
        self._shown: object = None

    def show(self, figures: LiveFigures) -> None:
        """Draw these figures from now on, if there is anything new in them."""
        self.figures = figures
        news = self.news(figures)
        if news != self._shown:
            self._shown = news
            self.refresh()

    def news(self, figures: LiveFigures) -> object:
        """What has to differ for drawing again to be worth it."""
        return id(figures), figures.version

    def lines(self, figures: LiveFigures, width: int, height: int) -> Sequence[Content]:
        """At most `height` lines of at most `width` cells."""
        raise NotImplementedError

    def render(self) -> Content:
        width, height = self.content_size
        if width < 4 or height < 1:
            return Content("")
        return Content("\n").join(self.lines(self.figures, width, height)[:height])


def row(*pieces: Piece) -> Content:
    """One line from its pieces."""
    return Content.assemble(*pieces)


def spread(left: Content, right: Content, width: int) -> Content:
    """`left` and `right` at the two ends of a line; the right end gives way where both do not fit."""
    gap = width - left.cell_length - right.cell_length
    return Content.assemble(left, " " * gap, right) if gap >= 1 else left.truncate(width)


def bar(share: float, width: int, style: str, rest: str = "$foreground 20%") -> Content:
    """A horizontal bar filled from the left in eighths of a cell."""
    share = min(1.0, max(0.0, share))
    eighths = round(share * width * 8)
    full, part = divmod(eighths, 8)
    head = "█" * full + (" ▏▎▍▌▋▊▉"[part] if part else "")
    if not head and share > 0:
        head = "▏"
    return Content.assemble((head, style), ("─" * (width - len(head)), rest))
