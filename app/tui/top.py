"""`headrace top`: the decode view of a running server, live.

The same sections as in F2, fed from a server's event stream (`TelemetryReader`) in place of a conversation: one endless
turn that every answer joins (`LiveMetrics.begin_batch`). tests/tui/test_top.py has scripted events.
"""

import asyncio
from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.reactive import Reactive
from textual.screen import Screen
from textual.theme import Theme

from headrace.app.config.settings import Settings
from headrace.app.engine.events import Done, Event, Ready
from headrace.app.engine.telemetry_reader import TelemetryReader
from headrace.app.output.explanations import of_section
from headrace.app.output.sanitise import sanitise
from headrace.app.tui.decode.meters import MeterLines, whole_why
from headrace.app.tui.decode.panel import NUMBERED, Sections, section_bindings
from headrace.app.tui.hangup import end_on_signals, when_mounted
from headrace.app.tui.metrics.facts import TurnFigures
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.screens.help_screen import HelpScreen, keys_of
from headrace.app.tui.textual_overrides.crash import CrashReports
from headrace.app.tui.textual_overrides.partial_repaint import use_partial_repaint
from headrace.app.tui.themes import OWN_THEMES, own_variables, terminal_theme
from headrace.app.tui.widgets.key_bar import KeyBar
from headrace.app.tui.widgets.status_bar import Status, StatusBar

_POLL_S = 0.5  # between two drawings
_ROWS = 16  # answers on the screen
_TURNS = 50  # ended answers that are kept
_HEAD = "meters"  # id of the head, whose figures are explained first


class TopScreen(Screen[None]):
    """The decode view without a line to ask in."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,escape", "app.quit", "Quit", key_display="q"),
        Binding("f7,space", "app.freeze", "Freeze", key_display="F7"),
        Binding("question_mark,f1,w", "app.show_keys", "Figures explained", key_display="?"),
        *section_bindings(),
    ]

    def __init__(self, metrics: LiveMetrics) -> None:
        super().__init__()
        use_partial_repaint(self)
        self._metrics = metrics

    def compose(self) -> ComposeResult:
        yield StatusBar(self._metrics, id="status")
        yield MeterLines(self._metrics, id=_HEAD)
        yield Sections(self._metrics)
        yield KeyBar()

    def action_section(self, number: int) -> None:
        """Show the section of a number before the others, or put it back."""
        self.query_one(Sections).toggle(NUMBERED[number - 1].NAME)

    def show(self, metrics: LiveMetrics, status: Status, *, frozen: bool) -> None:
        """Draw these metrics."""
        self.set_class(frozen, "-frozen")
        self.query_one(StatusBar).set_status(status, with_speed=False)
        self.query_one(MeterLines).show(metrics, frozen=frozen)
        self.query_one(Sections).show(metrics)


class TopApp(CrashReports[None]):
    """The decode view over the events of a server. url: as it is shown."""

    CSS_PATH = "headrace.tcss"
    TITLE = "headrace top"
    ENABLE_COMMAND_PALETTE = False
    theme: Reactive[str] = Reactive(terminal_theme)
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

    def get_theme(self, theme_name: str) -> Theme | None:
        """Find the themes of headrace before they are registered."""
        return OWN_THEMES.get(theme_name) or super().get_theme(theme_name)

    def get_css_variables(self) -> dict[str, str]:
        return {**super().get_css_variables(), **own_variables(self.current_theme)}

    async def on_mount(self) -> None:
        for theme in OWN_THEMES.values():
            self.register_theme(theme)
        wanted = self._settings.screen.theme
        self.theme = wanted if wanted in self.available_themes else terminal_theme()
        if not self.is_headless:
            end_on_signals(self, self._reader.close)
        await self.push_screen(TopScreen(self.metrics))
        self.run_worker(self._poll())

    async def _poll(self) -> None:
        while True:
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
            shown = [_HEAD, *(section.NAME for section in self.screen.query_one(Sections).shown)]
            figures = list(dict.fromkeys(each for name in shown for each in of_section(name)))
            self.push_screen(HelpScreen(keys_of(self.screen), figures, whole_why(self.metrics)))
