"""Drawing of text lines in a widget's style, without textual's wrapping, aligning and measuring.

For widgets that make their own lines and redraw while an answer streams.
"""

from rich.segment import Segment
from textual.content import Content
from textual.strip import Strip
from textual.style import Style
from textual.widget import Widget


class StyleCache:
    """Caches parsed style names; `clear` it after the widget's style or theme changed."""

    def __init__(self, widget: Widget) -> None:
        self._widget = widget
        self._named: dict[str | Style, Style] = {}

    def clear(self) -> None:
        self._named.clear()

    def strip(self, content: Content, width: int) -> Strip:
        """Return one line of exactly `width` cells, padded or cut."""
        base = self._widget.visual_style
        segments = [Segment(text, style.rich_style) for text, style in content.render(base, "", self._meaning)]
        cells = content.cell_length
        if cells < width:
            rest = " " * (width - cells)
            if segments and segments[-1].style is base.rich_style:  # fewer bytes for the terminal
                rest = segments.pop().text + rest
            segments.append(Segment(rest, base.rich_style))
        return Strip(segments, max(cells, width)).crop(0, width)

    def _meaning(self, name: str | Style) -> Style:
        style = self._named.get(name)
        if style is None:
            style = self._named[name] = name if isinstance(name, Style) else Style.parse(name)
        return style
