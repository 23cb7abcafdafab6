"""Repainting of what changed on a screen, not of everything in the rectangle around the changes.

Textual's compositor asks every widget that touches the rectangle around all changes for all its lines. It throws away
those that did not change, and cuts the rest where widgets overlap. Here a change inside one uncovered widget, nearly
every change, goes to the terminal as the lines that this widget draws. Otherwise only the frontmost widgets of a
changed region are asked, for its lines alone. The methods are textual's own, narrowed: if textual stops calling them,
its screens are drawn as usual.

Textual also passes a change from the widget through the screen to a timer, each a task of its own. `repaint` notes the
change where that chain ends and has all changes drawn once the running task waits.

`put` writes a part of a widget past that chain. `Transcript.extend_last_line` calls it for words that only extend the
last line of an answer. It is there for steady text, not to save processor time: without a spare core the poller allows
few layouts (`app.tui.poller`), and text between two of them is drawn by `put`.

    repaint(widget, region): as `widget.refresh(region)`, without its chain of tasks
    PartialRepaint: textual asks it for an update, with the regions that it has noted itself
    put(widget, region): at once, past textual

tests/tui/textual_overrides/test_partial_repaint.py compares with whole drawings.
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from textual._compositor import ChopsUpdate, Compositor
from textual.content import Content
from textual.geometry import Region
from textual.screen import Screen
from textual.strip import Strip
from textual.widget import Widget


def use_partial_repaint(screen: Screen[Any]) -> None:
    """Give a screen the compositor of this module; call it in the screen's constructor."""
    screen._compositor = PartialRepaint()


def repaint(widget: Widget, region: Region) -> None:
    """Do the same as `widget.refresh(region)`, for a widget whose size does not depend on its content.

    A widget without a place on the screen is left to the layout that gives it one and draws it whole. Its repaint
    before that layout would make textual place all widgets anew without drawing those that moved.
    """
    if not widget.is_mounted:
        widget.refresh(region)
        return
    screen = widget.screen
    if widget not in screen._compositor.visible_widgets:
        return
    if not screen._dirty_widgets:  # else they are going to be drawn
        asyncio.get_running_loop().call_soon(_draw, screen)
    widget._set_dirty(region)
    screen._dirty_widgets.add(widget)


def _draw(screen: Screen[object]) -> None:
    """Put what changed on the terminal, unless that is done."""
    if screen._dirty_widgets:
        screen._on_timer_update()


def repaint_subtitle(widget: Widget, subtitle: Content) -> None:
    """Set a widget's subtitle and repaint its lower edge; textual would repaint the whole widget."""
    widget._border_subtitle = subtitle
    gutter = widget.gutter
    repaint(widget, Region(-gutter.left, widget.content_size.height, widget.outer_size.width, gutter.bottom))


def put(widget: Widget, region: Region) -> bool:
    """Put a part of a widget on the terminal now, and nothing else; return whether that was possible.

    region: the part, from the widget's upper left corner. It is not possible where something covers the part, or if
    textual is about to draw the widget or to move it.
    """
    screen = widget.screen
    compositor = screen._compositor
    if not isinstance(compositor, PartialRepaint):  # of a screen without `use_partial_repaint`
        return False
    if not screen.is_current:  # another screen is in front
        return False
    if screen._layout_required or screen._scroll_required:  # widgets may move
        return False
    if screen._repaint_required or widget in screen._dirty_widgets:  # this part would be drawn twice
        return False
    if widget not in compositor.visible_widgets:  # scrolled out of view, or not laid out yet
        return False

    placement, _ = compositor.visible_widgets[widget]
    lines = compositor.lines_of(widget, region.translate(placement.offset))
    app = screen.app
    driver = app._driver
    if lines and driver is not None and not app.is_headless and not app.is_inline:  # as in `App._display`
        # The cursor returns to its place: an input method shows its text there.
        x, y = screen.outer_size.clamp_offset(app.cursor_position)
        driver.write(f"{PlacedLines(lines).render_segments(app.console)}\x1b[{y + 1};{x + 1}H")
    return bool(lines)


class PlacedLines(ChopsUpdate):
    """An update of placed lines: (column, row, strip)."""

    def __init__(self, lines: Sequence[tuple[int, int, Strip]]) -> None:
        super().__init__([], [], [])
        self._lines = lines

    def render_segments(self, console: Console) -> str:
        return "".join([f"\x1b[{y + 1};{x + 1}H{strip.render(console)}" for x, y, strip in self._lines])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Segment(self.render_segments(console))


class PartialRepaint(Compositor):
    """A compositor that draws the changed regions, front to back, until all are covered."""

    def __init__(self) -> None:
        super().__init__()
        self._changed: list[Region] = []  # the regions of the current partial update
        self._owners: dict[Region, tuple[Widget, Region] | None] = {}  # results of `_owner`
        self._owners_among: object = None  # the visible widgets they were found for

    def render_partial_update(self) -> ChopsUpdate | None:
        screen = self.size.region
        self._changed = [shown for region in self._dirty_regions if (shown := region.intersection(screen))]
        if not self._changed:  # a widget asked twice
            self._dirty_regions.clear()
            return None
        try:
            lines = self._placed_lines()
            if not lines:
                return super().render_partial_update()
            self._dirty_regions.clear()
            return PlacedLines(lines)
        finally:
            self._changed = []

    def _placed_lines(self) -> list[tuple[int, int, Strip]] | None:
        """Return the lines of the changed regions; None if several widgets show in one of them."""
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
        """Return the lines of this part of the screen; none if other widgets show in it."""
        owner = self._owner(part)
        if owner is None:
            return []
        shown_widget, region = owner
        if shown_widget is not widget:
            return []
        strips = widget.render_lines(part.translate(-region.offset))
        return [(part.x, part.y + row, strip) for row, strip in enumerate(strips)]

    def _owner(self, part: Region) -> tuple[Widget, Region] | None:
        """Return the one widget that shows in this part of the screen and its region; None if there are several."""
        # Textual makes another mapping of visible widgets with every layout: the same object means the same places.
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
        """Yield region, clip and lines of each widget in the changed regions, the frontmost first."""
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
