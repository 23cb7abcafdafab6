"""Decode view of F2: all sections, a cursor over the steps, freeze and export. Letters typed here do nothing."""

from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.screen import Screen

from headrace.app.output.explanations import Explanation, of_section
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
from headrace.app.tui.decode.speed import SentenceLines, SpeedSection
from headrace.app.tui.decode.turns import TurnsSection
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.textual_overrides.partial_repaint import use_partial_repaint
from headrace.app.tui.widgets.key_bar import KeyBar
from headrace.app.tui.widgets.lines import Section
from headrace.app.tui.widgets.status_bar import Status, StatusBar

_WIDE = 132  # cells from which the right column is the wider one
_NARROW = 80  # cells below which all parts stand in one column
_TALL = 32  # lines from which every part has room


class DecodeScreen(Screen[None]):
    """Draws the metrics that the app passes in, live or frozen."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f2,escape", "app.pop_screen", "Back", key_display="F2", priority=True),
        Binding("f7", "app.freeze", "Freeze", key_display="F7"),
        Binding("question_mark", "app.show_keys", "Figures explained", key_display="?", show=False),
        Binding("ctrl+e", "app.export_metrics", "Export JSON"),
        Binding("ctrl+x", "app.export_trace", "Trace"),
        Binding("x", "app.export_trace(True)", "Trace, when frozen", show=False),
        Binding("left", "cursor(-1)", "Step back", key_display="←"),
        Binding("right", "cursor(1)", "Step on", key_display="→"),
        Binding("shift+left,pageup", "cursor(-20)", "20 back", show=False),
        Binding("shift+right,pagedown", "cursor(20)", "20 on", show=False),
        Binding("end", "cursor(100000)", "Newest step", show=False),
        Binding("up", "scroll(-3)", "Up", show=False),
        Binding("down", "scroll(3)", "Down", show=False),
    ]

    def __init__(self, metrics: LiveMetrics, status: Status, *, frozen: bool) -> None:
        super().__init__()
        use_partial_repaint(self)
        self.metrics, self._status, self._frozen = metrics, status, frozen
        self._made = False  # its parts are there

    def compose(self) -> ComposeResult:
        yield StatusBar(self.metrics, id="status")
        yield SentenceLines(self.metrics, id="sentence")
        with Horizontal(id="decode-columns"):
            with Vertical(id="decode-left"):
                yield SpeedSection(self.metrics, id="speed")
                yield BatchSizeSection(self.metrics, id="batch-size")
                yield PoolSection(self.metrics, id="pool")
                yield BandwidthSection(self.metrics, id="bandwidth")
                yield HistorySection(self.metrics, id="history")
                yield RooflineSection(self.metrics, id="roofline")
                yield MachineSection(self.metrics, id="machine")
            with Vertical(id="decode-right"):
                yield SequencesSection(self.metrics, id="sequences")
                yield LatencySection(self.metrics, id="latency")
                yield SpeculationSection(self.metrics, id="speculation")
                yield ContextSpeedSection(self.metrics, id="context")
                yield CacheSection(self.metrics, id="cache")
                yield TurnsSection(self.metrics, id="turns")
        yield KeyBar()

    @property
    def figures(self) -> list[Explanation]:
        """Explanations of the figures on the screen, in the order of its sections."""
        shown = [section for section in self.query("Section, SpeedSection") if section.display]
        return list(dict.fromkeys(each for section in shown for each in of_section(section.id or "")))

    def on_mount(self) -> None:
        for section in self.query("Section, SpeedSection"):
            if section.id != "latency":  # the mouse walks through its steps
                found = of_section(section.id or "")
                section.tooltip = Content("\n".join(f"{each.name}: {each.sentence}" for each in found))
        self._made = True
        self._draw()

    def show(self, metrics: LiveMetrics, status: Status, *, frozen: bool) -> None:
        """Draw these metrics, once the sections are mounted."""
        self.metrics, self._status, self._frozen = metrics, status, frozen
        if self._made:
            self._draw()

    def _draw(self) -> None:
        self.set_class(self.metrics.batch is not None, "-batch")
        self.set_class(self._frozen, "-frozen")
        self.set_class(self.metrics.speculating and self.metrics.batch is None, "-speculating")
        self.query_one(StatusBar).set_status(self._status, with_speed=False)
        self.query_one(SentenceLines).show(self.metrics, frozen=self._frozen)
        self.query_one(SpeedSection).show(self.metrics, self._frozen)
        for section in self.query(Section):
            section.show(self.metrics)

    def on_resize(self, event: events.Resize) -> None:
        self.set_class(event.size.width >= _WIDE, "-wide")
        self.set_class(event.size.width < _NARROW, "-one-column")
        self.set_class(event.size.height >= _TALL, "-tall")
        self.query_one(SentenceLines).styles.height = 2

    def action_scroll(self, by: int) -> None:
        """Scroll the one column of a narrow window."""
        self.query_one("#decode-columns").scroll_relative(y=by, animate=False)

    def action_cursor(self, by: int) -> None:
        self.query_one(LatencySection).move_cursor(by)
