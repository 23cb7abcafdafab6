"""The application: the chat's state, its polling loop and its first screen.

The engine's process starts after the first frame.

`headrace chat` makes it (`app/cli/chat.py`). The app overrides textual where keys, themes and notifications behave in
another way; operations on the conversation are in `ChatState`, and drawing is in the screens and the poller.
tests/tui/test_start.py has the start, test_chat.py nearly all keys.
"""

import gc
from collections.abc import Callable, Sequence
from typing import ClassVar

from rich.cells import cell_len
from textual import events
from textual.binding import Binding, BindingType
from textual.command import CommandPalette
from textual.driver import Driver
from textual.drivers.linux_driver import LinuxDriver
from textual.filter import LineFilter, Monochrome, NoColor
from textual.notifications import Notify
from textual.theme import Theme

from headrace.app.chat.conversation import Conversation
from headrace.app.config.settings import Settings, save_setting
from headrace.app.engine.client import ChatEngine, EngineClient
from headrace.app.tui.decode.panel import DecodePanel
from headrace.app.tui.hangup import end_on_signals, when_mounted
from headrace.app.tui.input.ask_line import AskLine
from headrace.app.tui.metrics.machine_watch import MachineWatch
from headrace.app.tui.palette import AppCommands
from headrace.app.tui.poller import Poller
from headrace.app.tui.screens.chat_screen import ChatScreen
from headrace.app.tui.screens.chat_state import ChatState
from headrace.app.tui.screens.decode_screen import DecodeScreen
from headrace.app.tui.textual_overrides.background import BackgroundColour
from headrace.app.tui.textual_overrides.driver import BackgroundQueryDriver, TerminalDriver
from headrace.app.tui.textual_overrides.input_method import InputMethodCursor
from headrace.app.tui.textual_overrides.option_list import Palette
from headrace.app.tui.themes import ThemedApp, theme_for_background

_TOAST_FRAME = 3  # cells of a notification beside its text


class HeadraceApp(InputMethodCursor, ThemedApp):
    """The chat over an engine that has not been started."""

    CSS_PATH = "headrace.tcss"
    TITLE = "headrace"
    COMMANDS: ClassVar = {AppCommands}
    VERTICAL_BREAKPOINTS = [(0, "-short"), (20, "-high")]  # noqa: RUF012 - as textual declares it
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+q", "quit", "Quit", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", "Suspend", show=False, priority=True),
        Binding("f1", "show_keys", "Help", key_display="F1", priority=True),
    ]

    def __init__(
        self,
        conversation: Conversation,
        *,
        settings: Settings | None = None,
        watch: MachineWatch | None = None,
        second_engine: Callable[[], ChatEngine] = EngineClient,
    ) -> None:
        """Take the parts of a chat.

        conversation: to open first; its engine is not started.
        settings: the user's; None: defaults.
        watch: machine load; None: not shown.
        second_engine: makes the engine of a second model.
        """
        self.settings = settings or Settings()  # textual asks for the driver while it is constructed
        super().__init__()
        self.state = ChatState(self, conversation, settings=self.settings, second_engine=second_engine)
        self.poller = Poller(self, self.state, watch)
        self._early: list[events.Event] | None = []  # keys and pastes before the first frame; None after it
        self._theme_at_start = ""

    # -- life ------------------------------------------------------------------------------------------------------

    def get_key_display(self, binding: Binding) -> str:
        """See `App`. The letter after a caret is a capital, as on the keyboard."""
        name = super().get_key_display(binding)
        return name.upper() if name.startswith("^") else name

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Replace textual's grey filter for NO_COLOR under a theme of ANSI colours, which have no greys."""
        filters = super().get_line_filters()
        if not (self.no_color and self.native_ansi_color):
            return filters
        return [NoColor() if isinstance(each, Monochrome) else each for each in filters]

    def get_driver_class(self) -> type[Driver]:
        """Return textual's choice, with our driver in place of its Linux driver.

        Ours asks for the terminal's background colour, unless the user chose a theme.
        """
        chosen = super().get_driver_class()
        if chosen is not LinuxDriver:
            return chosen
        return TerminalDriver if self.settings.screen.theme else BackgroundQueryDriver

    async def on_event(self, event: events.Event) -> None:
        """Hold keys back until the prompt is mounted; give the prompt the focus before a letter meant for it.

        Textual drops keys without a focused widget, and would move the focus only after the next key.
        """
        if self._early is not None and isinstance(event, events.Key | events.Paste) and not event.is_forwarded:
            self._early.append(event)
        else:
            if isinstance(event, events.Key) and not event.is_forwarded and isinstance(self.screen, ChatScreen):
                self.screen.focus_prompt_for(event)
            await super().on_event(event)

    async def on_mount(self) -> None:
        wanted = self.settings.screen.theme
        self.begin_with_theme(wanted)
        self._theme_at_start = self.theme
        self.theme_changed_signal.subscribe(self, self._save_theme)
        if not self.is_headless:
            end_on_signals(self, self.state.close)
        await self.push_screen(ChatScreen(self.state))
        if wanted and wanted not in self.available_themes:
            self.state.notify(f"no theme called {wanted!r}; Ctrl+P lists themes", problem=True)
        if self.state.store.unsaved is not None:
            self.state.notify(self.state.store.unsaved, problem=True)
        self.call_after_refresh(self._start)

    def on_background_colour(self, event: BackgroundColour) -> None:
        """Switch to the theme for the terminal's background, unless the user chose one."""
        if not self.settings.screen.theme and self.theme == self._theme_at_start:
            self._theme_at_start = theme_for_background(light=event.light)
            self.theme = self._theme_at_start

    async def _start(self) -> None:
        """Pass on early keys, load the model and begin to poll; the first frame is out."""
        early = self._early or []
        self._early = None
        for event in early:
            await self.on_event(event)
        state = self.state
        if state.engine.state == "stopped":
            state.conversation.load_model()
        if state.engine.state == "loading":
            state.metrics.loading("starting the engine", None)
        gc.freeze()  # the app's own objects live as long as the process
        gc.set_threshold(20_000)
        gc.enable()  # off since the command began
        self.run_worker(self.poller.run())

    def post_display_hook(self) -> None:
        self.poller.interval.drawn()

    async def on_notify(self, event: Notify) -> None:
        """Show a notification in place of the one before it; textual would leave an empty frame of that.

        A long one has lines of its own; others stand over the keys, so that no text moves. docs/workarounds.md lists
        the fault.
        """
        super().clear_notifications()
        if self.screen_stack:
            await self.screen.query("ToastHolder").remove()
            room = self.size.width - sum(panel.region.width for panel in self.screen.query(DecodePanel))
            is_long = cell_len(event.notification.message) > room - _TOAST_FRAME
            self.screen.set_class(is_long, "-long-notification")

    def clear_notifications(self) -> None:
        self.state.notifications_cleared()
        super().clear_notifications()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer the palette on the chat and the decode view only."""
        if action == "command_palette":
            return isinstance(self.screen, ChatScreen | DecodeScreen) and self.state.comparison is None
        return super().check_action(action, parameters)

    def _save_theme(self, theme: Theme) -> None:
        """Save a theme that the user chose as the one to start with."""
        if theme.name == self._theme_at_start:
            return
        self._theme_at_start = ""  # every later theme is the user's choice, also the first one
        self.state.attempt(lambda: save_setting("screen", "theme", theme.name))

    # -- actions ---------------------------------------------------------------------------------------------------

    async def action_quit(self) -> None:
        self.state.close()
        when_mounted(self, self.exit)

    def action_command(self, name: str) -> None:
        """Carry out a slash command without an argument."""
        if (chat := self.poller.chat) is not None:
            chat.run_command(name, "")

    def action_freeze(self) -> None:
        """Freeze the shown metrics, or show the live ones again."""
        self.state.frozen = None if self.state.frozen else self.state.metrics.frozen()
        self.poller.draw_metrics(force=True)

    def action_export_trace(self) -> None:
        self.state.export_trace()

    def action_time_steps(self) -> None:
        """Time every decode step by part, or a sample of them again."""
        self.state.time_all_steps(not self.state.times_all_steps)

    def action_decode_view(self) -> None:
        chat = self.poller.chat
        if chat is None or isinstance(self.screen, DecodeScreen):
            return
        state = self.state
        view = chat.view
        line = AskLine(view.prompt, chat.send, usable=state.comparison is None and view.editing is None)
        self.push_screen(DecodeScreen(state.shown_metrics, state.status, line, frozen=state.frozen is not None))

    def action_help_quit(self) -> None:
        """Replace textual's hint for Ctrl+C, which names another key."""
        self.state.notify("Esc goes back, Ctrl+Q quits")

    def action_command_palette(self) -> None:
        """See `App`."""
        if not isinstance(self.screen, CommandPalette):
            self.push_screen(Palette(id="--command-palette"))

    def action_redraw(self) -> None:
        """Repaint everything, after another program wrote to the terminal."""
        self.refresh(repaint=True, layout=True)

    def action_show_keys(self) -> None:
        from headrace.app.tui.screens.help_screen import HelpScreen, keys_of

        if isinstance(self.screen, HelpScreen):
            self.screen.dismiss()
            return
        screen = self.screen
        if isinstance(screen, ChatScreen):
            self.push_screen(HelpScreen())
        elif isinstance(screen, DecodeScreen):
            self.push_screen(HelpScreen(keys_of(screen), screen.figures, screen.why))
        else:
            self.push_screen(HelpScreen(keys_of(screen)))
