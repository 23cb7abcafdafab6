"""Strips of the transcript's rows: gutter, text, scroll bar."""

from textual.color import Color
from textual.content import Content
from textual.strip import Strip
from textual.style import Style
from textual.widget import Widget

from headrace.app.tui.transcript.entry import Row
from headrace.app.tui.widgets.line_strip import line_strip

GUTTER = 3  # cells left of the text: the selection mark and air
_THUMB = Content.styled("▐", "$scrollbar")


class RowStrips:
    """Draws rows in a widget's style."""

    def __init__(self, widget: Widget) -> None:
        self._widget = widget
        self._ground: Color | None = None

    def clear(self) -> None:
        """Forget the background: the widget's style changed."""
        self._ground = None

    def strip(self, row: Row, *, thumb: bool, marked: bool = False, span: tuple[int, int] | None = None) -> Strip:
        """Return the strip of a row.

        thumb: the scroll bar's thumb shows beside it. marked: its message is selected. span: first and last of the
        selected characters (-1: to the end).
        """
        return self._finished(self._text(row, marked=marked, span=span), thumb=thumb)

    def located(self, line: int, row: Row) -> Strip:
        """Return a row with the position of every character, for selection with the mouse."""
        return self._text(row).apply_offsets(0, line)

    def banner(self, text: str, *, thumb: bool) -> Strip:
        """Return a right-aligned line over the text."""
        width = self._widget.size.width - 1
        label = Content.styled(f" {text} ", "bold $text-accent on $surface").truncate(max(0, width), ellipsis=True)
        label = label.pad_left(max(0, width - label.cell_length))
        return self._finished(line_strip(self._widget, label, width + 1), thumb=thumb)

    def _text(self, row: Row, *, marked: bool = False, span: tuple[int, int] | None = None) -> Strip:
        """Return a line with its gutter and an empty scroll bar."""
        content, kind = row
        width = self._widget.size.width - 1
        whole = Content.assemble(("▌".ljust(GUTTER), "$accent") if marked else " " * GUTTER, content)
        if kind == "user" or span is not None:
            whole = whole.pad_right(max(0, width - whole.cell_length))
        if kind == "user":
            whole = whole.stylize_before("on $surface")
        if span is not None:
            start, end = span
            style = Style.from_styles(self._widget.screen.get_component_styles("screen--selection"))
            whole = whole.stylize(style, start, len(whole.plain) if end == -1 else end)
        return line_strip(self._widget, whole, width + 1)

    def _finished(self, strip: Strip, *, thumb: bool) -> Strip:
        """Add the thumb and apply the terminal's colour filters."""
        if thumb:
            strip = Strip.join([strip.crop(0, strip.cell_length - 1), line_strip(self._widget, _THUMB, 1)])
        if self._ground is None:
            self._ground = self._widget.background_colors[1]
        for line_filter in self._widget.get_line_filters():
            strip = strip.apply_filter(line_filter, self._ground)
        return strip
