"""The application: one engine, one conversation at a time, and the screens that show them.

The engine's process starts after the first frame is on the screen.
"""

import gc
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.driver import Driver
from textual.drivers.linux_driver import LinuxDriver
from textual.filter import LineFilter, Monochrome, NoColor
from textual.theme import Theme

from headrace.app.chat.answer_setup import AnswerSetup
from headrace.app.chat.conversation import Conversation
from headrace.app.chat.parallel_answer import ParallelAnswer
from headrace.app.config.settings import Settings, save_setting
from headrace.app.engine.client import ChatEngine, EngineClient
from headrace.app.sessions.records import Session
from headrace.app.sessions.store import SessionStore
from headrace.app.tui.hangup import end_on_signals, when_made
from headrace.app.tui.input.clipboard import copy_with_tool
from headrace.app.tui.metrics.feed import met, stored_turns
from headrace.app.tui.metrics.machine_watch import MachineWatch
from headrace.app.tui.palette import AppCommands
from headrace.app.tui.poller import PolledApp
from headrace.app.tui.screens.chat_screen import ChatScreen
from headrace.app.tui.screens.decode_screen import DecodeScreen
from headrace.app.tui.textual_overrides.background import BackgroundColour
from headrace.app.tui.textual_overrides.driver import BackgroundQueryDriver, TerminalDriver
from headrace.app.tui.themes import DARK, LIGHT, own_variables, terminal_theme, theme_for_background
from headrace.runtime.config.paths import data_dir
from headrace.runtime.config.replace_file import replace_file
from headrace.runtime.errors import HeadraceError, SessionError


class HeadraceApp(PolledApp):
    """The chat, over an engine that was not started yet."""

    CSS_PATH = "headrace.tcss"
    TITLE = "headrace"
    COMMANDS: ClassVar = {AppCommands}
    VERTICAL_BREAKPOINTS = [(0, "-short"), (20, "-high")]  # noqa: RUF012 - as textual declares it
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+q", "quit", "Quit", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", "Suspend", show=False, priority=True),
        Binding("f1", "show_keys", "Help", key_display="F1"),
    ]

    def __init__(
        self,
        engine: ChatEngine,
        store: SessionStore,
        session: Session | None = None,
        *,
        settings: Settings | None = None,
        context: int | None = None,
        kv: str = "f16",
        warning: str | None = None,
        watch: MachineWatch | None = None,
        second_engine: Callable[[], ChatEngine] = EngineClient,
    ) -> None:
        """context, kv: how to load models, see `ModelSpec`. warning: said once the chat is on the screen.

        watch: looks at the machine; without one nothing is said about it. second_engine: makes another one, for a model
        beside the first.
        """
        self.settings = settings or Settings()  # asked for on the way up
        super().__init__(engine, Conversation(engine, store, session, context=context, kv=kv), watch)
        self._warning = warning
        self.store = store
        self._load_with: dict[str, Any] = {"context": context, "kv": kv}
        self._second_engine = second_engine
        self.left_with: SessionError | None = None
        """What could not be stored on leaving."""
        self._early: list[events.Event] | None = []  # keys and pastes from before the first frame, None after it
        self._theme_at_start = ""

    # -- life ------------------------------------------------------------------------------------------------------

    def get_css_variables(self) -> dict[str, str]:
        return {**super().get_css_variables(), **own_variables(self.current_theme)}

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Textual decides on what NO_COLOR means before it knows the theme: greys, which ANSI colours do not have."""
        filters = super().get_line_filters()
        if not (self.no_color and self.native_ansi_color):
            return filters
        return [NoColor() if isinstance(one, Monochrome) else one for one in filters]

    def get_driver_class(self) -> type[Driver]:
        chosen = super().get_driver_class()
        if chosen is not LinuxDriver:
            return chosen
        return TerminalDriver if self.settings.screen.theme else BackgroundQueryDriver

    async def on_event(self, event: events.Event) -> None:
        """Keys wait for the input to be there: textual drops what nothing has the focus for. Letters that are meant for
        it take it the focus at once, which textual would do after the next of them."""
        if self._early is not None and isinstance(event, events.Key | events.Paste) and not event.is_forwarded:
            self._early.append(event)
        else:
            if isinstance(event, events.Key) and not event.is_forwarded and isinstance(self.screen, ChatScreen):
                self.screen.meet(event)
            await super().on_event(event)

    async def on_mount(self) -> None:
        for theme in (DARK, LIGHT):
            self.register_theme(theme)
        wanted = self.settings.screen.theme
        self.theme = self._theme_at_start = wanted if wanted in self.available_themes else terminal_theme()
        self.theme_changed_signal.subscribe(self, self._remember_theme)
        if not self.is_headless:
            end_on_signals(self, self.leave)
        await self.push_screen(ChatScreen(self))
        if wanted and wanted not in self.available_themes:
            self.say(f"there is no theme {wanted}; Ctrl+P lists them", problem=True)
        if self._warning is not None:
            self.say(self._warning, problem=True)
        self.call_after_refresh(self._start)

    def on_background_colour(self, event: BackgroundColour) -> None:
        """The terminal answered: a theme that nobody chose suits it from now on."""
        if not self.settings.screen.theme and self.theme == self._theme_at_start:
            self._theme_at_start = theme_for_background(light=event.light)
            self.theme = self._theme_at_start

    async def _start(self) -> None:
        """The first frame is out: take what was typed before it, load the model, begin to poll."""
        early, self._early = self._early or [], None
        for event in early:
            await self.on_event(event)
        if self.engine.state == "stopped":
            self.conversation.load_model()
        if self.engine.state == "loading":
            self.metrics.loading("starting the engine", None)
        gc.freeze()  # the app itself lives as long as the process: not to be looked through again for every answer
        gc.set_threshold(20_000)
        self.run_worker(self._poll())

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """The palette is for the chat and its metrics: other screens hold on to what its commands would change."""
        if action == "command_palette":
            return isinstance(self.screen, ChatScreen | DecodeScreen) and self.comparison is None
        return super().check_action(action, parameters)

    async def action_quit(self) -> None:
        self.leave()
        when_made(self, self.exit)

    def leave(self) -> None:
        """Keep what was said, end the engine."""
        if not self._left:
            self._left = True
            try:
                if self.comparison is not None:
                    self.comparison.close()
                self.conversation.close()
            except SessionError as error:  # a full disk, a session that was deleted elsewhere
                self.left_with = error
            finally:
                self.engine.close()

    def _remember_theme(self, theme: Theme) -> None:
        """A theme chosen in the palette is the one to start with next time; the first one nobody chose."""
        if theme.name == self._theme_at_start:
            return
        self._theme_at_start = ""  # from now on every theme was chosen, that one too
        try:
            save_setting("screen", "theme", theme.name)
        except HeadraceError as error:
            self.refuse(error)

    # -- what the screens ask for ----------------------------------------------------------------------------------

    def open_session(self, session: Session | None) -> None:
        """Go on with a session, or begin a new one with the settings of the old."""
        old = self.conversation
        if session is None:
            kept = old.session
            session = self.store.create(model=kept.model, system=kept.system, sampling=kept.sampling)
        old.stop()
        old.close()
        self.conversation = Conversation(self.engine, self.store, session, **self._load_with)
        if session.model != old.session.model or self.engine.state in ("failed", "dead", "stopped"):
            self.conversation.load_model()
        if self.chat is not None:
            self.chat.conversation_changed()

    def compare(self, other: AnswerSetup) -> None:
        """See `ChatApp`."""
        from headrace.app.chat.comparison import Comparison
        from headrace.app.tui.screens.compare_screen import CompareScreen

        self.comparison = Comparison(self.conversation, other, self._second_engine, **self._load_with)
        self._compare_screen = CompareScreen(self, self.comparison)
        self.push_screen(self._compare_screen)

    def again(self, count: int) -> None:
        """See `ChatApp`."""
        from headrace.app.chat.candidates import Candidates
        from headrace.app.tui.screens.again_screen import AgainScreen

        candidates = self.comparison = Candidates(self.conversation, count)
        self._meet_several(candidates)
        self._compare_screen = AgainScreen(self, candidates)
        self.push_screen(self._compare_screen)

    def end_comparison(self, side: ParallelAnswer | None) -> None:
        """See `ChatApp`."""
        if (ended := self.comparison) is None:
            return
        ended.take(side)
        self.comparison = self._compare_screen = None
        self.pop_screen()
        turns = stored_turns(self.conversation.messages)
        if ended.ids:  # of one model, which is still there: its figures stay
            self.metrics.set_turns(turns)
        else:
            if self.engine.card is not None:
                met(self.metrics, self.engine.card, self.metrics.machine)
            else:
                self.metrics.loading("starting the engine", None)
            self.metrics.session_changed(turns)
        if self.chat is not None:
            self.chat.conversation_changed()

    def go_to(self, message_id: int, words: str) -> None:
        if self.chat is not None:
            self.chat.transcript.go_to(message_id, words)

    def action_command(self, name: str) -> None:
        """Carry out a slash command that needs no argument."""
        if self.chat is not None:
            self.chat.run_command(name, "")

    def restart_engine(self) -> None:
        """Bring the engine back after it died, or try a failed load again."""
        self.conversation.notice = None
        try:
            self.engine.restart()
        except HeadraceError as error:
            self.refuse(error)
        else:
            self.metrics.loading("starting the engine", None)

    def copy(self, text: str, what: str) -> None:
        """To the clipboard: through the terminal, and through the platform's tool in the background."""
        if not text:
            self.say("there is nothing to copy", problem=True)
            return
        self.copy_to_clipboard(text)
        self.run_worker(lambda: copy_with_tool(text), thread=True, exit_on_error=False)
        self.say(f"copied {what}: {len(text):,} characters")

    def action_freeze(self) -> None:
        """Hold the metrics as they are, or let them go on."""
        self.frozen = None if self.frozen else self.metrics.frozen()
        self.draw_metrics(force=True)

    def action_export_metrics(self) -> None:
        """Write what the decode view shows to a JSON file."""
        path = data_dir() / "exports" / time.strftime("decode-%Y%m%d-%H%M%S.json")
        self._write(path, json.dumps((self.frozen or self.metrics).document(), indent=2) + "\n")

    def action_decode_view(self) -> None:
        """The decode view in full."""
        if not isinstance(self.screen, DecodeScreen):
            shown = self.frozen or self.metrics
            self.push_screen(DecodeScreen(shown, self.status(), frozen=self.frozen is not None))

    def action_help_quit(self) -> None:
        """Ctrl+C where there is nothing to stop or to copy; textual would name a key that is not the one here."""
        self.say("Esc goes back, Ctrl+Q leaves the program")

    def action_show_keys(self) -> None:
        from headrace.app.tui.screens.help_screen import HelpScreen

        if not isinstance(self.screen, HelpScreen):
            self.push_screen(HelpScreen())

    def export_session(self, session_id: str, name: str) -> None:
        """See `ChatApp`."""
        from headrace.app.sessions.export import export_path, exported

        path = export_path(session_id, name)
        if session_id == self.conversation.session.id:
            self.conversation.settle()
        self._write(path, exported(self.store, session_id, path))

    def _write(self, path: Path, text: str) -> None:
        try:
            replace_file(path, text)
        except OSError as error:
            self.say(f"cannot write {path}: {error.strerror}", problem=True)
        else:
            self.say(f"wrote {path}")
