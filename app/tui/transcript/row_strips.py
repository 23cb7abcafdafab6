"""Strips of the transcript's rows: gutter, text, scroll bar.

`Transcript.render_lines` asks for the rows in view with each repaint. Strips are cached by the identity of a row's
content, so text that did not change costs nothing.

Guard: tests/tui/textual_overrides/test_partial_repaint.py.
"""

from textual.cache import FIFOCache
from textual.color import Color
from textual.content import Content
from textual.strip import Strip
from textual.style import Style
from textual.widget import Widget

from headrace.app.tui.transcript.entry import ShownRow
from headrace.app.tui.widgets.lines import line_strip

GUTTER = 3  # cells left of the text: the selection mark and air
_THUMB = Content.styled("▐", "$scrollbar")
_KEPT = 256  # strips: text that scrolls draws every row in view again


class RowStrips:
    """Draws rows in a widget's style."""

    def __init__(self, widget: Widget) -> None:
        self._widget = widget
        self._ground: Color | None = None
        self._drawn: FIFOCache[tuple[int, int, bool], tuple[Content, Strip]] = FIFOCache(_KEPT)

    def clear(self) -> None:
        """Forget the background and all strips: the widget's style changed."""
        self._ground = None
        self._drawn.clear()

    def strip(
        self, row: ShownRow, width: int, *, thumb: bool, marked: bool = False, span: tuple[int, int] | None = None
    ) -> Strip:
        """Return the strip of a row.

        width: of the widget.
        thumb: the scroll bar's thumb shows beside it.
        marked: its message is selected.
        span: first and last of the selected characters (-1: to the end).
        """
        if marked or span is not None:
            return self._finished(self._text(row, width, marked=marked, span=span), width, thumb=thumb)
        # The key has the content object, not its text: a line that stays the same stays the same object, see
        # `GrowingMarkdown`. The row's kind is not in the key: only "user" changes the look, and no content object is in
        # rows of "user" and of another kind. Marked and selected rows are never in the cache, and `clear` empties it
        # when the style changes.
        content, _ = row
        key = id(content), width, thumb
        drawn = self._drawn.get(key)
        if drawn is not None:
            _, strip = drawn
            return strip
        strip = self._finished(self._text(row, width), width, thumb=thumb)
        # The cache keeps the content, too: as long as the object exists, no other one has its id.
        self._drawn[key] = content, strip
        return strip

    def located(self, line: int, row: ShownRow) -> Strip:
        """Return a row with the position of every character, for selection with the mouse."""
        width = self._widget.size.width
        return line_strip(self._widget, self._text(row, width), width).apply_offsets(0, line)

    def banner(self, text: str, width: int, *, thumb: bool) -> Strip:
        """Return a right-aligned line over the text."""
        label = Content.styled(f" {text} ", "bold $text-accent on $surface").truncate(max(0, width - 1), ellipsis=True)
        return self._finished(label.pad_left(max(0, width - 1 - label.cell_length)), width, thumb=thumb)

    def _text(self, row: ShownRow, width: int, *, marked: bool = False, span: tuple[int, int] | None = None) -> Content:
        """Return a line with its gutter and without the scroll bar."""
        content, kind = row
        gutter = Content(" " * GUTTER)
        if marked:
            gutter = Content.styled("▌".ljust(GUTTER), "$accent")
        whole = Content.assemble(gutter, content)
        if kind == "user" or span is not None:
            whole = whole.pad_right(max(0, width - 1 - whole.cell_length))
        if kind == "user":
            whole = whole.stylize_before("on $surface")
        if span is not None:
            start, end = span
            if end == -1:
                end = len(whole.plain)
            style = Style.from_styles(self._widget.screen.get_component_styles("screen--selection"))
            whole = whole.stylize(style, start, end)
        return whole

    def _finished(self, line: Content, width: int, *, thumb: bool) -> Strip:
        """Return the strip of a line, with the thumb and in the terminal's colours."""
        if thumb:
            line = Content.assemble(line.truncate(max(0, width - 1), pad=True), _THUMB)
        if self._ground is None:
            _, self._ground = self._widget.background_colors  # of its parent, of itself
        return line_strip(self._widget, line, width, self._ground)
