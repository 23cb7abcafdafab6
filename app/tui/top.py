"""`headrace top`: the decode view of a running server, live.

The same sections as in F2, fed from a server's event stream (`TelemetryReader`) in place of a conversation: one endless
turn that every answer joins (`LiveMetrics.begin_batch`). tests/tui/test_top.py has scripted events.
"""

import asyncio
from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from headrace.app.config.settings import Settings
from headrace.app.engine.events import Done, Event, Ready
from headrace.app.engine.telemetry_reader import TelemetryReader
from headrace.app.output.sanitise import sanitise
from headrace.app.tui.decode.meters import MeterLines
from headrace.app.tui.decode.panel import Sections, section_bindings
from headrace.app.tui.hangup import end_on_signals, when_mounted
from headrace.app.tui.metrics.facts import TurnFigures
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.screens.decode_screen import HEAD, MetricsScreen
from headrace.app.tui.screens.help_screen import HelpScreen, keys_of
from headrace.app.tui.themes import ThemedApp
from headrace.app.tui.widgets.key_bar import KeyBar
from headrace.app.tui.widgets.status_bar import Status, StatusBar

_POLL_S = 0.5  # between two drawings
_ROWS = 16  # answers on the screen
_TURNS = 50  # ended answers that are kept


class TopScreen(MetricsScreen):
    """The decode view without a line to ask in."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,escape", "app.quit", "Quit", key_display="q"),
        Binding("f7,space", "app.freeze", "Freeze", key_display="F7"),
        Binding("question_mark,f1", "app.show_keys", "Figures explained", key_display="?"),
        *section_bindings(),
    ]

    def compose(self) -> ComposeResult:
        yield StatusBar(self.metrics, id="status")
        yield MeterLines(self.metrics, id=HEAD)
        yield Sections(self.metrics)
        yield KeyBar()


class TopApp(ThemedApp):
    """The decode view over the events of a server. url: as it is shown."""

    CSS_PATH = "headrace.tcss"
    TITLE = "headrace top"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+q,ctrl+c", "quit", "Quit", show=False, priority=True)]

    def __init__(self, reader: TelemetryReader, url: str, settings: Settings | None = None) -> None:
        self._settings = settings or Settings()
        super().__init__()
        self.metrics = LiveMetrics()
        self.metrics.begin_batch((), _ROWS)
        self._reader = reader
        self._url = sanitise(url)
        self._frozen: LiveMetrics | None = None
        self._answers = 0

    async def on_mount(self) -> None:
        self.begin_with_theme(self._settings.screen.theme)
        if not self.is_headless:
            end_on_signals(self, self._reader.close)
        await self.push_screen(TopScreen(self.metrics))
        self.run_worker(self._poll())

    async def _poll(self) -> None:
        while self.is_running:
            self.take(self._reader.poll())
            self.show()
            await asyncio.sleep(_POLL_S)

    def take(self, events: Sequence[Event]) -> None:
        """Take in events of the server."""
        for event in events:
            self.metrics.take([event])
            if isinstance(event, Ready):
                self.metrics.begin_batch((), _ROWS)
            elif isinstance(event, Done):
                self._answers += 1
                turn = TurnFigures.of(self._answers, event.end.summary, event.end.reason)
                self.metrics.set_turns([*self.metrics.turns[1 - _TURNS :], turn])

    def show(self) -> None:
        """Draw the present figures, or the frozen ones."""
        if isinstance(self.screen, TopScreen):
            problem = self._reader.problem
            model = self.metrics.model
            name = sanitise(model.name) or "no model"
            context = 0
            if steps := self.metrics.charted:
                context = steps[-1].context
            marks = (problem,) if problem else ()
            status = Status(name, self._url, context, model.context_limit or None, marks=marks)
            self.screen.show(self._frozen or self.metrics, status, frozen=self._frozen is not None)

    async def action_quit(self) -> None:
        self._reader.close()
        when_mounted(self, self.exit)

    def action_freeze(self) -> None:
        """Freeze the figures, or show the live ones again."""
        self._frozen = None if self._frozen else self.metrics.frozen()
        self.show()

    def action_show_keys(self) -> None:
        """Show the keys, and explain the figures on the screen; or leave them."""
        if isinstance(self.screen, HelpScreen):
            self.screen.dismiss()
        elif isinstance(self.screen, TopScreen):
            self.push_screen(HelpScreen(keys_of(self.screen), self.screen.figures, self.screen.why))
