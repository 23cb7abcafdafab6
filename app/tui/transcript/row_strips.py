"""Strips of the transcript's rows: gutter, text, scroll bar. Each row is drawn once."""

from textual.color import Color
from textual.content import Content
from textual.strip import Strip
from textual.style import Style
from textual.widget import Widget

from headrace.app.tui.transcript.entry import BLANK, Row
from headrace.app.tui.widgets.style_cache import StyleCache

GUTTER = 3  # cells left of the text: the selection mark and air
_KEPT = 4000
_THUMB = Content.styled("▐", "$scrollbar")


class RowStrips:
    """Draws rows in a widget's style and keeps them until `clear`."""

    def __init__(self, widget: Widget) -> None:
        self._widget = widget
        self._style_cache = StyleCache(widget)
        self._plain: dict[int, tuple[Content, Strip]] = {}  # by line, where the thumb is elsewhere
        self._beside_thumb: dict[int, tuple[Strip, Strip]] = {}  # by line: without and with it
        self._thumb: Strip | None = None
        self._blank: tuple[Strip, Strip] | None = None  # without and with the thumb
        self._ground: Color | None = None

    def clear(self) -> None:
        """Forget all strips: the widget's width or style changed."""
        self._style_cache.clear()
        self._plain.clear()
        self._beside_thumb.clear()
        self._thumb = self._blank = None
        self._ground = None

    def strip(self, line: int, row: Row, *, thumb: bool) -> Strip:
        """Return the strip of row number `line`. thumb: the scroll bar's thumb shows beside it."""
        if row is BLANK:
            return self.below(thumb=thumb)
        kept = self._plain.get(line)
        if kept is None or kept[0] is not row[0]:
            if len(self._plain) >= _KEPT:
                self._plain.clear()
                self._beside_thumb.clear()
            kept = self._plain[line] = row[0], self._finished(self._text(row))
        if not thumb:
            return kept[1]
        beside = self._beside_thumb.get(line)
        if beside is None or beside[0] is not kept[1]:
            beside = self._beside_thumb[line] = kept[1], self._with_thumb(kept[1])
        return beside[1]

    def marked(self, row: Row, *, thumb: bool, marked: bool, span: tuple[int, int] | None) -> Strip:
        """Return a row with the mark of the selected message, or with selected characters (-1: to the end)."""
        text = self._finished(self._text(row, marked=marked, span=span))
        return self._with_thumb(text) if thumb else text

    def located(self, line: int, row: Row) -> Strip:
        """Return a row with the position of every character, for selection with the mouse."""
        return self._text(row).apply_offsets(0, line)

    def below(self, *, thumb: bool) -> Strip:
        """Return an empty line."""
        if self._blank is None:
            blank = self._finished(self._text(BLANK))
            self._blank = blank, self._with_thumb(blank)
        return self._blank[thumb]

    def banner(self, text: str, *, thumb: bool) -> Strip:
        """Return a right-aligned line over the text."""
        width = self._widget.size.width - 1
        label = Content.styled(f" {text} ", "bold $text-accent on $surface").truncate(max(0, width), ellipsis=True)
        drawn = self._finished(self._style_cache.strip(label.pad_left(max(0, width - label.cell_length)), width + 1))
        return self._with_thumb(drawn) if thumb else drawn

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
        return self._style_cache.strip(whole, width + 1)

    def _with_thumb(self, text: Strip) -> Strip:
        if self._thumb is None:
            self._thumb = self._finished(self._style_cache.strip(_THUMB, 1))
        return Strip.join([text.crop(0, text.cell_length - 1), self._thumb])

    def _finished(self, strip: Strip) -> Strip:
        """Apply the terminal's colour filters."""
        if self._ground is None:
            self._ground = self._widget.background_colors[1]
        for line_filter in self._widget.get_line_filters():
            strip = strip.apply_filter(line_filter, self._ground)
        return strip
