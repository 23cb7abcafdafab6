"""The decode view beside the chat: the sections that fit its height, most important first.

It takes the requested width if the chat keeps enough columns, less if not, and is hidden below its least width. In a
wide window it also takes the columns that the chat's text leaves. The requested width is kept for a larger window. The
first window size decides whether the panel opens.
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
from headrace.app.tui.widgets.lines import LONGEST_LINE, Section

_LEAST, _MOST = 30, 90
_WIDER = 20
_OPEN_FROM = 112  # columns of the window from which it is open at the start
_CHAT = 60  # columns of the window that are never taken from the chat
_WHOLE_CHAT = LONGEST_LINE + 5  # columns of the chat, with those beside its text
ROOM_FROM = _LEAST + _CHAT
"""Columns of the window from which there is room for both."""
# Least height of the panel, in lines, for each section.
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
# In a turn with draft tokens.
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
# In a turn of parallel answers.
_FROM_BATCH = {"sequences": 0, "batch-size": 0, "pool": 26, "turns": 37, "machine": 44}


class DecodePanel(Vertical):
    """`show` redraws the visible sections, `fit` takes a new window size; the left edge can be dragged."""

    def __init__(self, metrics: LiveMetrics, settings: ScreenSettings, id: str | None = None) -> None:
        super().__init__(id=id)
        self.metrics = metrics
        self._dragging = False
        self._parts = _FROM
        self._settings = settings
        self._window = 0  # columns
        self._asked: int | None = None  # columns, without those that the chat leaves; None: hidden

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
        """Show the sections that fit."""
        for name in {**_FROM_SPECULATING, **_FROM_BATCH}:
            self.query_one(f"#{name}").display = name in self._parts and self.size.height >= self._parts[name]

    def fit(self, window: int) -> None:
        """Take the width that fits in a window of `window` columns."""
        if not self._window and window >= _OPEN_FROM and self._settings.decode_view:
            self._asked = self._settings.decode_view_width
        self._window = window
        self._take_width()

    def step(self) -> None:
        """Step to the next width: off, narrow, wide. Skip widths that look the same in this window."""
        narrow = self._settings.decode_view_width
        wider = [cells for cells in (narrow, narrow + _WIDER) if self._shown(cells) > self._shown(self._asked)]
        self._asked = wider[0] if wider else None
        self._take_width()

    def _shown(self, asked: int | None) -> int:
        """Return the width that is shown for a requested one; 0: hidden."""
        if asked is None or self._window < ROOM_FROM:
            return 0
        return min(asked + self._left_over, self._window - _CHAT)

    @property
    def _left_over(self) -> int:
        """Columns of a wide window that the chat's text does not need, beyond the panel's configured width."""
        return max(0, min(_MOST, self._window - _WHOLE_CHAT) - self._settings.decode_view_width)

    def _take_width(self) -> None:
        width = self._shown(self._asked)
        self.display = width > 0
        if width:
            self.styles.width = width
        for toasts in self.screen.query("ToastRack"):
            toasts.styles.padding = (0, width, 0, 0)  # over the chat, not over a chart

    def on_mouse_down(self, event: events.MouseDown) -> None:
        if event.x == 0:
            self._dragging = True
            self.capture_mouse()

    def on_mouse_move(self, event: events.MouseMove) -> None:
        if self._dragging:
            self._asked = min(_MOST, max(_LEAST, self._window - int(event.screen_x))) - self._left_over
            self._take_width()

    def on_mouse_up(self) -> None:
        if self._dragging:
            self._dragging = False
            self.release_mouse()
