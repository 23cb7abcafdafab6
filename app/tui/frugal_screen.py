"""A screen whose repaint costs what changed on it, not what stands on it.

Textual's compositor asks every widget that touches the rectangle around all changes for all its lines, and throws
away those that did not change. With a transcript and a dozen charts beside it that is most of what the chat's process
does while an answer streams, and every key typed then draws the whole screen. Here only the widgets on top of a
changed region are asked, and only for its lines. The two methods below are textual's own, narrowed; should textual
stop calling them, its screens are drawn as they always were.
"""

from collections.abc import Iterable
from typing import Any

from textual._compositor import ChopsUpdate, Compositor
from textual.geometry import Region
from textual.screen import Screen
from textual.strip import Strip


class FrugalScreen(Screen[None]):
    """A screen over a FrugalCompositor."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._compositor = FrugalCompositor()


class FrugalCompositor(Compositor):
    """Draws the regions that changed, front to back, until all of them are covered."""

    def __init__(self) -> None:
        super().__init__()
        self._changed: list[Region] = []  # what the partial update under way has to draw

    def render_partial_update(self) -> ChopsUpdate | None:
        screen = self.size.region
        self._changed = [shown for region in self._dirty_regions if (shown := region.intersection(screen))]
        try:
            return super().render_partial_update()
        finally:
            self._changed = []

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
