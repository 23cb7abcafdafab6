"""Widgets that draw lines made from live metrics.

Lines are made when the metrics change. Only the range from the first to the last different line is repainted.

A subclass defines `lines`, and `change_key` if it shows less than all metrics. A line that is too wide is cut. Below
the widgets are the parts that lines are made of (`spread`, `legend`, `bar`, ...), pure functions of texts and widths.

Guards: tests/tui/test_text_flow.py and tests/tui/textual_overrides/test_partial_repaint.py.
"""

from collections.abc import Callable, Sequence
from itertools import zip_longest

from rich.cells import cell_len
from rich.segment import Segment
from textual.color import Color
from textual.content import Content
from textual.geometry import Region
from textual.strip import Strip
from textual.style import Style
from textual.widget import Widget

from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.textual_overrides.partial_repaint import repaint, repaint_subtitle

LONGEST_LINE = 120
"""Cells of the chat's text; longer lines are hard to read."""

# Styles of draft tokens, in the transcript and in the decode view
ACCEPTED = "underline $text-success"
REJECTED = "strike $text-error"

Piece = str | tuple[str, str]
"""Text, or text and its style."""

_EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")


def line_strip(widget: Widget, content: Content, width: int, ground: Color | None = None) -> Strip:
    """Draw one line of exactly `width` cells, padded or cut, without textual's wrapping, aligning and measuring.

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


class Lines(Widget):
    """Draws `lines(metrics, width, height)`; `show` brings it up to date.

    Textual draws the frame (border and padding) once per size. Later only the lines within it are drawn.
    """

    ALLOW_SELECT = False
    can_focus = False

    def __init__(self, metrics: LiveMetrics, id: str | None = None) -> None:
        super().__init__(id=id)
        self.metrics = metrics
        self._shown_key: object = None  # change key of the lines
        self._lines: list[Content] = []
        self._frame: list[Strip] = []  # the whole widget without its lines
        self._frame_key: object = None  # size and titles of that frame
        self._sides: list[tuple[Strip, Strip]] = []  # of each line of the frame: left and right of the text
        self._inner = (0, 0)  # columns between them: first, and after the last
        self._background = Color(0, 0, 0)
        self._line_strips: dict[int, tuple[Content, Strip]] = {}  # by index: the line that was drawn, without frame

    def show(self, metrics: LiveMetrics) -> None:
        """Draw these metrics if their change key is different."""
        self.metrics = metrics
        key = self.change_key(metrics)
        if key != self._shown_key:
            self._shown_key = key
            self.redraw()

    def redraw(self) -> None:
        """Make the lines again and repaint those that changed."""
        width, height = self.content_size
        old = self._lines
        new = []
        if width >= 4 and height >= 1:  # else no text can be read, and `lines` need not handle widths below the margins
            new = list(self.lines(self.metrics, width, height)[:height])
        # Equal lines are the same objects: what is not, has changed.
        for y, (old_line, new_line) in enumerate(zip(old, new, strict=False)):
            if old_line.is_same(new_line):
                new[y] = old_line
        self._lines = new
        changed = [y for y, (old_line, new_line) in enumerate(zip_longest(old, new)) if old_line is not new_line]
        if changed:
            repaint(self, Region(0, changed[0], width, changed[-1] + 1 - changed[0]))

    def change_key(self, metrics: LiveMetrics) -> object:
        """Return a value that differs if the lines have to be made again."""
        return id(metrics), metrics.version

    def lines(self, metrics: LiveMetrics, width: int, height: int) -> Sequence[Content]:
        """Return at most `height` lines of at most `width` cells."""
        raise NotImplementedError

    def render_lines(self, crop: Region) -> list[Strip]:
        """Return the strips of a region within textual's frame, which is cached: it costs more than the lines."""
        frame_key = (self.outer_size, self.border_title, self.border_subtitle)
        if frame_key != self._frame_key:
            self._frame_key = frame_key
            self._draw_frame()
        top = self.gutter.top
        bottom = top + len(self._lines)
        if crop.column_span == self._inner and top <= crop.y and crop.bottom <= bottom:
            # Nearly always, text alone has changed: no strip of the frame is needed.
            return [self._line(y - top) for y in crop.line_range]
        strips = [self._whole_line(y) for y in crop.line_range]
        if crop.column_span == (0, self.outer_size.width):
            return strips
        return [strip.crop(crop.x, crop.right) for strip in strips]

    def _draw_frame(self) -> None:
        """Draw the frame, and divide it into what is left and right of the lines."""
        width, height = self.outer_size
        # All lines between the edges are the same: the first one is drawn, with the upper edge.
        strips = super().render_lines(Region(0, 0, width, min(height, self.gutter.top + 1)))
        strips += strips[-1:] * (height - len(strips) - self.gutter.bottom)
        strips += super().render_lines(Region(0, len(strips), width, height - len(strips)))
        left = self.gutter.left
        right = left + self.content_size.width
        self._frame = strips
        self._inner = (left, right)
        self._sides = [(strip.crop(0, left), strip.crop(right)) for strip in strips]
        _, self._background = self.background_colors  # of its parent, of itself
        self._line_strips.clear()

    def _whole_line(self, y: int) -> Strip:
        """Return a line of the widget with the frame left and right of it, or a line of the frame."""
        index = y - self.gutter.top
        if 0 <= index < len(self._lines):
            left, right = self._sides[y]
            return Strip.join([left, self._line(index), right])
        if y < len(self._frame):
            return self._frame[y]
        return Strip.blank(self.outer_size.width)  # asked for at the old size of a shrunk window

    def _line(self, index: int) -> Strip:
        """Return the strip of a line without the frame."""
        content = self._lines[index]
        drawn_content, strip = self._line_strips.get(index, (None, None))
        if strip is None or drawn_content is not content:
            left, right = self._inner
            strip = line_strip(self, content, right - left, self._background)
            self._line_strips[index] = (content, strip)
        return strip

    def render_line(self, y: int) -> Strip:  # noqa: ARG002
        """Return an empty line, from which textual makes the frame."""
        return line_strip(self, Content(""), self.content_size.width)

    def on_resize(self) -> None:
        self._lines = []
        self.redraw()
        self.refresh()

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._frame_key = None


class Section(Lines):
    """Lines in a frame with a title.

    NAME: its id.
    MIN_LINES: lines that it needs, with the frame.
    MAX_LINES: lines with the frame, beyond which there is nothing to add.
    IS_CHART: it shows more if it is wider.
    """

    TITLE = ""
    NAME = ""
    MIN_LINES = 4
    MAX_LINES = 8
    IS_CHART = False

    def __init__(self, metrics: LiveMetrics, id: str | None = None) -> None:
        super().__init__(metrics, id or self.NAME)
        self.border_title = self.TITLE

    def applies(self, metrics: LiveMetrics) -> bool:
        """Return whether there is something to show: for most sections, once there are steps."""
        return metrics.has_steps

    def set_subtitle(self, text: str, *, warns: bool = False) -> None:
        """Set the text in the lower edge; unchanged text is not drawn again."""
        if str(self.border_subtitle or "") == text:
            return
        subtitle = Content(text)
        if warns:
            subtitle = Content.styled(text, "bold $text-warning")
        repaint_subtitle(self, subtitle)


def spread(left: Content, right: Content, width: int) -> Content:
    """Return `left` and `right` at the ends of a line; without room, `left` alone."""
    gap = width - left.cell_length - right.cell_length
    if gap < 1:
        return left.truncate(width)
    return Content.assemble(left, " " * gap, right)


def first_that_fits(texts: Sequence[str], width: int) -> str:
    """Return the first of the texts that has at most `width` cells; the last one if none does."""
    return next((text for text in texts if cell_len(text) <= width), texts[-1])


def folded(line: Content, width: int) -> list[Content]:
    """Return a line, as several if it is too wide."""
    if line.cell_length <= width:
        return [line]
    return line.wrap(width)


def fitting(pieces: Sequence[Content], width: int) -> Content:
    """Return as many of the first pieces as fit into a line; the very first is cut if it does not fit."""
    line = pieces[0].truncate(width, ellipsis=True)
    for piece in pieces[1:]:
        if line.cell_length + 2 + piece.cell_length > width:
            break
        line = Content.assemble(line, "  ", piece)
    return line


def legend(
    pieces: Sequence[Content], rest: Callable[[int], Content], width: int, max_lines: int, gap: int = 2
) -> list[Content]:
    """Return the pieces in their order, as many as fit into the lines, then a piece for all others.

    pieces: all of them.
    rest: returns the piece that stands for `pieces[count:]`.
    width: cells of a line.
    max_lines: lines.
    gap: cells between two pieces.
    """
    for count in range(len(pieces), 0, -1):
        others = [rest(count)] if count < len(pieces) else []
        lines = _wrapped([*pieces[:count], *others], width, gap)
        if len(lines) <= max_lines and all(line.cell_length <= width for line in lines):
            return lines
    return [piece.truncate(width, ellipsis=True) for piece in pieces[:1]]


def _wrapped(pieces: Sequence[Content], width: int, gap: int) -> list[Content]:
    """Return lines of pieces; one that is wider than the width has a line to itself."""
    lines: list[Content] = []
    for piece in pieces:
        if lines and lines[-1].cell_length + gap + piece.cell_length <= width:
            lines[-1] = Content.assemble(lines[-1], " " * gap, piece)
        else:
            lines.append(piece)
    return lines


def segments(parts: Sequence[tuple[float, str, str]], width: int) -> Content:
    """Return a bar of `width` cells in parts: (value, character of a cell, style). A part above zero has a cell."""
    total = sum(value for value, _, _ in parts)
    shown = [part for part in parts if part[0] > 0]
    if total <= 0 or width < len(shown):
        return Content.styled("─" * width, "$foreground 20%")
    pieces: list[Piece] = []
    so_far = 0.0
    start = 0
    for index, (value, mark, style) in enumerate(shown):
        so_far += value
        # Ends are rounded from the sum so far, not each part by itself, whose errors would add up.
        num_after = len(shown) - 1 - index  # parts that need a cell each
        end = min(max(start + 1, round(so_far / total * width)), width - num_after)
        if num_after == 0:
            end = width
        pieces.append((mark * (end - start), style))
        start = end
    return Content.assemble(*pieces)


def bar(share: float, width: int, style: str) -> Content:
    """Return a horizontal bar filled from the left, in eighths of a cell."""
    share = min(1.0, max(0.0, share))
    full, eighths = divmod(round(share * width * 8), 8)
    head = "█" * full + _EIGHTHS[eighths]
    if not head and share > 0:
        head = _EIGHTHS[1]
    return Content.assemble((head, style), ("─" * (width - len(head)), "$foreground 20%"))
