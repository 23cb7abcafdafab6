"""Drawing of one text line in a widget's style, without textual's wrapping, aligning and measuring.

For widgets that make their own lines and redraw while an answer streams: transcript, sections, status and key bars.

Guard: tests/tui/textual_overrides/test_partial_repaint.py.
"""

from rich.segment import Segment
from textual.color import Color
from textual.content import Content
from textual.strip import Strip
from textual.style import Style
from textual.widget import Widget


def line_strip(widget: Widget, content: Content, width: int, ground: Color | None = None) -> Strip:
    """Return one line of exactly `width` cells, padded or cut.

    ground: the widget's background, for the terminal's colour filters; None: textual applies them.
    """
    base = widget.visual_style
    segments = [Segment(text, style.rich_style) for text, style in content.render(base, "", _style)]
    cells = content.cell_length
    if cells < width:
        rest = " " * (width - cells)
        if segments and segments[-1].style is base.rich_style:  # fewer bytes for the terminal
            rest = segments.pop().text + rest
        segments.append(Segment(rest, base.rich_style))
    if ground is not None:
        for line_filter in widget.get_line_filters():
            segments = line_filter.apply(segments, ground)
    return Strip(segments, max(cells, width)).crop(0, width)


def _style(name: str | Style) -> Style:
    """Return a style of a content's span, which may be a name such as `bold $primary`."""
    return name if isinstance(name, Style) else Style.parse(name)
