"""A screen whose repaint costs what changed on it, not what stands on it.

Textual's compositor asks every widget that touches the rectangle around all changes for all its lines, throws away
those that did not change, and cuts what is left where widgets begin and end on other lines. With a transcript and a
dozen charts on the screen that is most of what the chat's process does while an answer streams. Here a change inside
one widget that nothing covers, which is nearly every change, goes to the terminal as the lines that the widget draws
there; otherwise only the widgets on top of a changed region are asked, and only for its lines. The methods below are
textual's own, narrowed; should textual stop calling them, its screens are drawn as they always were.

Nor does a change wait for its turn: textual passes it from the widget through the screen to a timer, each of them a
task of its own, and wakes up once more after. `repaint` puts it down where that ends, `draw` puts all on the terminal,
`put` a line that has grown, past everything else.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from textual._compositor import ChopsUpdate, Compositor
from textual.geometry import Region
from textual.screen import Screen
from textual.strip import Strip
from textual.widget import Widget


class FrugalScreen(Screen[None]):
    """A screen over a PartialRepaint."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._compositor = PartialRepaint()

    def draw(self) -> None:
        """Put what changed on the terminal, now."""
        if self._dirty_widgets:
            self._on_timer_update()

    def put(self, widget: Widget, region: Region) -> bool:
        """See the function."""
        compositor = self._compositor
        if not isinstance(compositor, PartialRepaint) or widget not in compositor.visible_widgets:
            return False
        place = compositor.visible_widgets[widget][0].offset
        lines = compositor.lines_of(widget, region.translate(place))
        if lines and self.app._driver is not None and not self.app.is_headless and not self.app.is_inline:
            x, y = self.outer_size.clamp_offset(self.app.cursor_position)  # in one piece: a line needs no synchronising
            self.app._driver.write(f"{PlacedLines(lines).render_segments(self.app.console)}\x1b[{y + 1};{x + 1}H")
        return bool(lines)


def repaint(widget: Widget, region: Region) -> None:
    """What `widget.refresh(region)` does, for a widget whose size does not depend on what it shows."""
    if not widget.is_mounted:
        widget.refresh(region)
        return
    screen = widget.screen
    widget._set_dirty(region)
    screen._dirty_widgets.add(widget)
    screen.check_idle()  # should nobody call `draw`


def put(widget: Widget, region: Region) -> bool:
    """Put a part of a widget on the terminal now, and nothing else; whether that could be done.

    It cannot where something covers it, or where the screen is about to be laid out.
    """
    screen = widget.screen
    if not isinstance(screen, FrugalScreen) or not screen.is_current or screen._layout_required:
        return False
    if screen._repaint_required or screen._scroll_required or widget in screen._dirty_widgets:
        return False
    return screen.put(widget, region)


class PlacedLines(ChopsUpdate):
    """An update of lines that each have a place: column, row, what stands from there on."""

    def __init__(self, lines: Sequence[tuple[int, int, Strip]]) -> None:
        super().__init__([], [], [])
        self._lines = lines

    def render_segments(self, console: Console) -> str:
        return "".join([f"\x1b[{y + 1};{x + 1}H{strip.render(console)}" for x, y, strip in self._lines])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Segment(self.render_segments(console))


class PartialRepaint(Compositor):
    """Draws the regions that changed, front to back, until all of them are covered."""

    def __init__(self) -> None:
        super().__init__()
        self._changed: list[Region] = []  # what the partial update under way has to draw
        self._owners: dict[Region, tuple[Widget, Region] | None] = {}  # as `_owner` found them
        self._owners_among: object = None  # those widgets in those places

    def render_partial_update(self) -> ChopsUpdate | None:
        screen = self.size.region
        self._changed = [shown for region in self._dirty_regions if (shown := region.intersection(screen))]
        try:
            lines = self._placed_lines()
            if not lines:
                return super().render_partial_update()
            self._dirty_regions.clear()
            return PlacedLines(lines)
        finally:
            self._changed = []

    def _placed_lines(self) -> list[tuple[int, int, Strip]] | None:
        """The lines of the changed regions, if each of them belongs to one widget alone."""
        lines: list[tuple[int, int, Strip]] = []
        for part in self._changed:
            owner = self._owner(part)
            if owner is None:
                return None
            widget, region = owner
            strips = widget.render_lines(part.translate(-region.offset))
            lines += [(part.x, part.y + row, strip) for row, strip in enumerate(strips)]
        return lines

    def lines_of(self, widget: Widget, part: Region) -> list[tuple[int, int, Strip]]:
        """The lines of this part of the screen, if it is the widget's alone; else none."""
        owner = self._owner(part)
        if owner is None or owner[0] is not widget:
            return []
        strips = widget.render_lines(part.translate(-owner[1].offset))
        return [(part.x, part.y + row, strip) for row, strip in enumerate(strips)]

    def _owner(self, part: Region) -> tuple[Widget, Region] | None:
        """The widget that shows in all of this part of the screen, and its region; None if there are several."""
        if self._owners_among is not self.visible_widgets:
            self._owners_among = self.visible_widgets
            self._owners.clear()
        if part not in self._owners:
            self._owners[part] = None
            for widget, (region, clip) in self.visible_widgets.items():
                shown = region.intersection(clip)
                if shown.overlaps(part):
                    if shown.contains_region(part):
                        self._owners[part] = widget, region
                    break
        return self._owners[part]

    def _get_renders(self, crop: Region | None = None) -> Iterable[tuple[Region, Region, list[Strip]]]:
        """Region, clip and lines of every widget that shows in the changed regions, the frontmost first."""
        if not self._changed:
            yield from super()._get_renders(crop)
            return
        uncovered = self._changed
        for widget, (region, clip) in self.visible_widgets.items():
            shown = region.intersection(clip)
            touched = [part for part in uncovered if shown.overlaps(part)]
            if not touched:
                continue
            top = max(shown.y, min(part.y for part in touched))
            bottom = min(shown.bottom, max(part.bottom for part in touched))
            lines = Region(shown.x, top, shown.width, bottom - top)
            yield region, lines, widget.render_lines(lines.translate(-region.offset))
            uncovered = [part for part in uncovered if not shown.contains_region(part)]
            if not uncovered:
                return
