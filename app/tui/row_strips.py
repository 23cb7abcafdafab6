"""The transcript's rows as strips: gutter, text, scroll bar. A row is drawn once, wherever it scrolls after that."""

from textual.color import Color
from textual.content import Content
from textual.strip import Strip
from textual.style import Style
from textual.widget import Widget

from app.tui.brush import Brush
from app.tui.entry import BLANK, Row

GUTTER = 3  # cells left of the text: the selection mark and air
_KEPT = 4000
_BAR = {True: Content.styled("▐", "$scrollbar"), False: Content(" ")}


class RowStrips:
    """Draws rows in the style of a widget and keeps them until `clear`."""

    def __init__(self, widget: Widget) -> None:
        self._widget = widget
        self._brush = Brush(widget)
        self._texts: dict[int, tuple[Content, Strip]] = {}  # by line, finished but for the bar
        self._whole: dict[tuple[int, bool], tuple[Strip, Strip]] = {}  # by line and thumb: without and with the bar
        self._bars: dict[bool, Strip] = {}
        self._ground: Color | None = None

    def clear(self) -> None:
        """The widget's width or style changed."""
        self._brush.clear()
        self._texts.clear()
        self._whole.clear()
        self._bars.clear()
        self._ground = None

    def strip(self, line: int, row: Row, *, thumb: bool) -> Strip:
        """Row number `line`, as it goes to the terminal; `thumb` where the scroll bar's thumb shows."""
        kept = self._texts.get(line)
        if kept is None or kept[0] is not row[0]:
            if len(self._texts) >= _KEPT:
                self._texts.clear()
                self._whole.clear()
            kept = self._texts[line] = row[0], self._finished(self._text(row))
        whole = self._whole.get((line, thumb))
        if whole is None or whole[0] is not kept[1]:
            whole = self._whole[line, thumb] = kept[1], self._with_bar(kept[1], thumb=thumb)
        return whole[1]

    def marked(self, row: Row, *, thumb: bool, marked: bool, span: tuple[int, int] | None) -> Strip:
        """The same with the mark of the selected message, or with the selected characters `span` (-1: to the end)."""
        return self._with_bar(self._finished(self._text(row, marked=marked, span=span)), thumb=thumb)

    def located(self, line: int, row: Row) -> Strip:
        """Row number `line` with the place of every character in its style: textual asks when the mouse selects."""
        return self._text(row).apply_offsets(0, line)

    def below(self, *, thumb: bool) -> Strip:
        """A line past the last row."""
        return self._with_bar(self._finished(self._text(BLANK)), thumb=thumb)

    def _text(self, row: Row, *, marked: bool = False, span: tuple[int, int] | None = None) -> Strip:
        """A line with its gutter, without the scroll bar."""
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
        return self._brush.strip(whole, width)

    def _with_bar(self, text: Strip, *, thumb: bool) -> Strip:
        """The whole line."""
        bar = self._bars.get(thumb)
        if bar is None:
            bar = self._bars[thumb] = self._finished(self._brush.strip(_BAR[thumb], 1))
        return Strip.join([text, bar])

    def _finished(self, strip: Strip) -> Strip:
        """With the terminal's colours in place of those it does not have."""
        if self._ground is None:
            self._ground = self._widget.background_colors[1]
        for line_filter in self._widget.get_line_filters():
            strip = strip.apply_filter(line_filter, self._ground)
        return strip
