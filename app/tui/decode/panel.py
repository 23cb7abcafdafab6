"""The decode view beside the chat: the parts that fit its height, most telling first."""

from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical

from app.tui.decode.bandwidth import BandwidthSection
from app.tui.decode.cache import CacheSection
from app.tui.decode.latency import LatencySection
from app.tui.decode.memory import MemorySection
from app.tui.decode.roofline import RooflineSection
from app.tui.decode.section import Section
from app.tui.decode.speed import SpeedSection
from app.tui.decode.turns import TurnsSection
from app.tui.figures import LiveFigures

_LEAST, _MOST = 30, 90
# The height from which a part is shown, in lines of the panel.
_FROM = {"turns": 33, "roofline": 46, "memory": 52}


class DecodePanel(Vertical):
    """`show` redraws every visible part; the left edge can be dragged."""

    def __init__(self, figures: LiveFigures, id: str | None = None) -> None:
        super().__init__(id=id)
        self.figures = figures
        self._dragging = False

    def compose(self) -> ComposeResult:
        yield SpeedSection(self.figures, id="speed")
        yield LatencySection(self.figures, id="latency")
        yield BandwidthSection(self.figures, id="bandwidth")
        yield CacheSection(self.figures, id="cache")
        yield RooflineSection(self.figures, id="roofline")
        yield MemorySection(self.figures, id="memory")
        yield TurnsSection(self.figures, id="turns")

    def show(self, figures: LiveFigures, frozen: bool) -> None:
        """Draw these figures."""
        self.query_one(SpeedSection).show(figures, frozen)
        for section in self.query(Section):
            if section.display:
                section.show(figures)

    def on_resize(self, event: events.Resize) -> None:
        for name, height in _FROM.items():
            self.query_one(f"#{name}").display = event.size.height >= height

    def set_width(self, cells: int) -> None:
        """This wide; 0 hides it."""
        self.display = cells > 0
        if cells:
            self.styles.width = cells

    def on_mouse_down(self, event: events.MouseDown) -> None:
        if event.x == 0:
            self._dragging = True
            self.capture_mouse()

    def on_mouse_move(self, event: events.MouseMove) -> None:
        if self._dragging:
            self.styles.width = min(_MOST, max(_LEAST, self.screen.size.width - int(event.screen_x)))

    def on_mouse_up(self) -> None:
        if self._dragging:
            self._dragging = False
            self.release_mouse()
