"""The decode view beside the chat: the parts that fit its height, most telling first.

It is as wide as was asked for where the chat can spare that, narrower where it cannot, and hidden where what is left is
too narrow to read. What was asked for is remembered: it comes back with the room. The first size of the window decides
whether it is open, after that the user does.
"""

from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical

from headrace.app.config.settings import ScreenSettings
from headrace.app.tui.decode.bandwidth import BandwidthSection
from headrace.app.tui.decode.batch_size import BatchSizeSection
from headrace.app.tui.decode.cache import CacheSection
from headrace.app.tui.decode.context_speed import ContextSpeedSection
from headrace.app.tui.decode.history import HistorySection
from headrace.app.tui.decode.latency import LatencySection
from headrace.app.tui.decode.machine import MachineSection
from headrace.app.tui.decode.pool_map import PoolSection
from headrace.app.tui.decode.roofline import RooflineSection
from headrace.app.tui.decode.sequences import SequencesSection
from headrace.app.tui.decode.speculation import SpeculationSection
from headrace.app.tui.decode.speed import SpeedSection
from headrace.app.tui.decode.turns import TurnsSection
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.widgets.lines import Section

_LEAST, _MOST = 30, 90
_WIDER = 20
_OPEN_FROM = 112  # columns of the window from which it is open at the start
_CHAT = 60  # columns of the window that are never taken from the chat
ROOM_FROM = _LEAST + _CHAT
"""Columns of the window from which there is room for both."""
# The height from which a part is shown, in lines of the panel.
_FROM = {
    "latency": 0,
    "bandwidth": 0,
    "cache": 0,
    "context": 37,
    "turns": 44,
    "machine": 51,
    "history": 58,
    "roofline": 68,
}
# The same in a turn that guesses.
_FROM_SPECULATING = {
    "latency": 0,
    "bandwidth": 0,
    "cache": 0,
    "speculation": 33,
    "context": 43,
    "turns": 50,
    "machine": 57,
    "history": 64,
    "roofline": 74,
}
# The same after a turn of several answers side by side.
_FROM_BATCH = {"sequences": 0, "batch-size": 0, "pool": 26, "turns": 37, "machine": 44}


class DecodePanel(Vertical):
    """`show` redraws every visible part, `fit` is told of every new size; the left edge can be dragged."""

    def __init__(self, metrics: LiveMetrics, settings: ScreenSettings, id: str | None = None) -> None:
        super().__init__(id=id)
        self.metrics = metrics
        self._dragging = False
        self._parts = _FROM
        self._settings = settings
        self._window = 0  # columns
        self._asked = 0  # columns

    def compose(self) -> ComposeResult:
        yield SpeedSection(self.metrics, id="speed")
        yield SequencesSection(self.metrics, id="sequences")
        yield BatchSizeSection(self.metrics, id="batch-size")
        yield PoolSection(self.metrics, id="pool")
        yield LatencySection(self.metrics, id="latency")
        yield SpeculationSection(self.metrics, id="speculation")
        yield BandwidthSection(self.metrics, id="bandwidth")
        yield CacheSection(self.metrics, id="cache")
        yield ContextSpeedSection(self.metrics, id="context")
        yield HistorySection(self.metrics, id="history")
        yield RooflineSection(self.metrics, id="roofline")
        yield MachineSection(self.metrics, id="machine")
        yield TurnsSection(self.metrics, id="turns")

    def show(self, metrics: LiveMetrics, frozen: bool) -> None:
        """Draw these metrics."""
        parts = _FROM_BATCH if metrics.batch is not None else _FROM_SPECULATING if metrics.speculating else _FROM
        if parts is not self._parts:
            self._parts = parts
            self._choose()
        self.query_one(SpeedSection).show(metrics, frozen)
        for section in self.query(Section):
            if section.display:
                section.show(metrics)

    def on_resize(self) -> None:
        self._choose()

    def _choose(self) -> None:
        """Which parts show."""
        for name in {**_FROM_SPECULATING, **_FROM_BATCH}:
            self.query_one(f"#{name}").display = name in self._parts and self.size.height >= self._parts[name]

    def fit(self, window: int) -> None:
        """Take what there is room for in a window of so many columns."""
        if not self._window and window >= _OPEN_FROM and self._settings.decode_view:
            self._asked = self._settings.decode_view_width
        self._window = window
        self._take_width()

    def step(self) -> None:
        """Off, narrow, wide, and off again; not through widths that look the same in this window."""
        narrow = self._settings.decode_view_width
        wider = [cells for cells in (narrow, narrow + _WIDER) if self._shown(cells) > self._shown(self._asked)]
        self._asked = wider[0] if wider else 0
        self._take_width()

    def _shown(self, asked: int) -> int:
        """Columns there are for it; 0: it does not show."""
        return min(asked, self._window - _CHAT) if self._window >= ROOM_FROM else 0

    def _take_width(self) -> None:
        width = self._shown(self._asked)
        self.display = width > 0
        if width:
            self.styles.width = width

    def on_mouse_down(self, event: events.MouseDown) -> None:
        if event.x == 0:
            self._dragging = True
            self.capture_mouse()

    def on_mouse_move(self, event: events.MouseMove) -> None:
        if self._dragging:
            self._asked = min(_MOST, max(_LEAST, self._window - int(event.screen_x)))
            self._take_width()

    def on_mouse_up(self) -> None:
        if self._dragging:
            self._dragging = False
            self.release_mouse()
