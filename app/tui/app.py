"""The application: one engine, one conversation at a time, and the screens that show them.

It polls: ten times a second (see `app.tui.poll_interval`) it takes what the engine's process said, and lets the screen
that is on top draw its text; figures, and the colours of code, follow less often. Nothing is called per token. The
engine's process starts after the first frame is on the screen.
"""

import asyncio
import gc
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from textual import events
from textual.app import App
from textual.binding import Binding, BindingType
from textual.driver import Driver
from textual.drivers.linux_driver import LinuxDriver
from textual.filter import LineFilter, Monochrome, NoColor
from textual.theme import Theme

from headrace.app.answer_phrases import sampling_text
from headrace.app.chat.answer_setup import AnswerSetup
from headrace.app.chat.conversation import Conversation
from headrace.app.chat.side import Side
from headrace.app.engine.client import ChatEngine, EngineClient
from headrace.app.engine.messages import Damaged, Delta, Event, PeakMeasured, Pulled, PullFailed, PullProgress, Ready
from headrace.app.sanitise import sanitise
from headrace.app.sessions.records import Session
from headrace.app.sessions.store import SessionStore
from headrace.app.settings import Settings, save_setting
from headrace.app.tui.decode.feed import feed, met, stored_turns
from headrace.app.tui.decode.machine_watch import MachineWatch
from headrace.app.tui.decode.metrics import LiveMetrics
from headrace.app.tui.hangup import end_on_signals, when_made
from headrace.app.tui.input.clipboard import copy_with_tool
from headrace.app.tui.palette import AppCommands
from headrace.app.tui.poll_interval import PollInterval
from headrace.app.tui.screens.chat_screen import ChatScreen
from headrace.app.tui.screens.decode_screen import DecodeScreen
from headrace.app.tui.status_bar import Status
from headrace.app.tui.textual_overrides.driver import AskingDriver, TerminalDriver
from headrace.app.tui.textual_overrides.frugal_screen import FrugalScreen
from headrace.app.tui.textual_overrides.ground import Ground
from headrace.app.tui.themes import DARK, LIGHT, after_terminal, on_ground, own_variables
from headrace.app.tui.transcript.markdown_lines import parser
from headrace.runtime.errors import HeadraceError, SessionError, UsageError
from headrace.runtime.paths import data_dir

if TYPE_CHECKING:
    from headrace.app.chat.comparison import Comparison
    from headrace.app.tui.screens.compare_screen import CompareScreen

_NOTICE_S = 4.0  # a short message shows so long
_FIRST_METRICS_S = 0.4  # after a phase began there is something to say


class HeadraceApp(App[None]):
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
        warning: str | None = None,
        watch: MachineWatch | None = None,
        second_engine: Callable[[], ChatEngine] = EngineClient,
    ) -> None:
        """context: the limit to load models with. warning: said once the chat is on the screen.

        watch: looks at the machine; without one nothing is said about it. second_engine: makes another one, for a model
        beside the first.
        """
        self.settings = settings or Settings()  # asked for on the way up
        super().__init__()
        self._warning = warning
        self.engine = engine
        self.store = store
        self.metrics = LiveMetrics()
        self.frozen: LiveMetrics | None = None
        self.pulls: dict[str, PullProgress] = {}
        self._context_limit = context
        self.conversation = Conversation(engine, store, session, context=context)
        self.comparison: Comparison | None = None
        """Polled in the place of the conversation while there is one."""
        self._compare_screen: CompareScreen | None = None
        self._second_engine = second_engine
        self.left_with: SessionError | None = None
        """What could not be stored on leaving."""
        self._early: list[events.Event] | None = []  # keys and pastes from before the first frame, None after it
        self._left = False
        self._said: dict[str, float] = {}  # short messages, and until when they show
        self._theme_at_start = ""
        self._metrics_due = 0.0
        self._metrics_of = ""  # the session they are of
        self._drawn_version = -1
        self._drawn_phase: object = None
        self._drawn_load: object = None
        self._watch = watch
        self._interval = PollInterval()

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
        return TerminalDriver if self.settings.screen.theme else AskingDriver

    async def on_event(self, event: events.Event) -> None:
        """Keys wait for the input to be there: textual drops what nothing has the focus for."""
        if self._early is not None and isinstance(event, events.Key | events.Paste) and not event.is_forwarded:
            self._early.append(event)
        else:
            await super().on_event(event)

    async def on_mount(self) -> None:
        for theme in (DARK, LIGHT):
            self.register_theme(theme)
        wanted = self.settings.screen.theme
        self.theme = self._theme_at_start = wanted if wanted in self.available_themes else after_terminal()
        self.theme_changed_signal.subscribe(self, self._remember_theme)
        if not self.is_headless:
            end_on_signals(self, self.leave)
        await self.push_screen(ChatScreen(self))
        if wanted and wanted not in self.available_themes:
            self.say(f"there is no theme {wanted}; Ctrl+P lists them", problem=True)
        if self._warning is not None:
            self.say(self._warning, problem=True)
        self.call_after_refresh(self._start)

    def on_ground(self, event: Ground) -> None:
        """The terminal answered: a theme that nobody chose suits it from now on."""
        if not self.settings.screen.theme and self.theme == self._theme_at_start:
            self._theme_at_start = on_ground(light=event.light)
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
            return isinstance(self.screen, ChatScreen | DecodeScreen)
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
            self.say(str(error), problem=True)

    # -- polling ---------------------------------------------------------------------------------------------------

    async def _poll(self) -> None:
        """For as long as the app lives: take in and draw, then rest."""
        while not self._left:
            self._interval.begin()
            self.tick()
            if isinstance(self.screen, FrugalScreen):
                self.screen.draw()
            phase = (self.comparison or self.conversation).phase
            awaiting, whole = phase in ("waiting", "prefill"), self.comparison is not None and phase != "idle"
            await asyncio.sleep(self._interval.wait_s(awaiting=awaiting, whole=whole))

    def post_display_hook(self) -> None:
        self._interval.drawn()

    def tick(self) -> None:
        """Take in what happened and mark what is to be drawn anew."""
        if self._left:
            return
        if self.comparison is not None:
            self._compare_tick(self.comparison)
            return
        events = self.conversation.poll()
        feed(self.metrics, events)
        if self._metrics_of != self.conversation.session.id:
            self._metrics_of = self.conversation.session.id
            self.metrics.session_changed(stored_turns(self.conversation.messages))
        self._note(events)
        if self._watch is not None and (load := self._watch.look(time.monotonic())) is not None:
            self.metrics.looked(load)
        changed, self._drawn_phase = self.metrics.phase != self._drawn_phase, self.metrics.phase
        figures = (now := time.perf_counter()) >= self._metrics_due or changed
        if (chat := self.chat) is not None and not (events and self._text_alone(events, chat, figures=figures)):
            self._interval.whole()
            chat.sync(events)
        if figures:
            self._metrics_due = now + (_FIRST_METRICS_S if changed else self._interval.metrics_s)
            self._interval.with_figures()
            if chat is not None:
                chat.transcript.settle()
                chat.tell_status()
            self.draw_metrics()

    def _compare_tick(self, comparison: "Comparison") -> None:
        """The same while two answers are compared."""
        heard = comparison.poll()
        feed(self.metrics, [event for _, event in heard if isinstance(event, PeakMeasured)])
        self._note([event for _, event in heard])
        if self._watch is not None and (load := self._watch.look(time.monotonic())) is not None:
            self.metrics.looked(load)
        if self._compare_screen is not None:
            self._compare_screen.sync(heard)

    def _text_alone(self, events: list[Event], chat: ChatScreen, *, figures: bool) -> bool:
        """Whether no more than text came, and shows already, or can wait until text is laid out anew."""
        if figures or self.conversation.phase != "answering" or not all(isinstance(one, Delta) for one in events):
            return False
        if chat.type_on():
            self._interval.quick()
            return True
        return not self._interval.whole_due

    def status(self) -> Status:
        """What the line at the top says."""
        talk = self.conversation
        name = self.metrics.model.name or talk.session.model or ""
        how = sampling_text(talk.effective), sampling_text(talk.effective, short=True)
        return Status(sanitise(name), sanitise(talk.session.title), talk.context_tokens, talk.context_limit, how)

    def draw_metrics(self, *, force: bool = False) -> None:
        """Draw the decode view, if it shows and if there is news."""
        shown = self.frozen or self.metrics
        if (shown.version, shown.load) == (self._drawn_version, self._drawn_load) and not force:
            return
        self._drawn_version, self._drawn_load = shown.version, shown.load
        if isinstance(self.screen, DecodeScreen):
            self.screen.show(shown, self.status(), frozen=self.frozen is not None)
        elif isinstance(self.screen, ChatScreen):
            self.screen.show_metrics(shown, self.frozen is not None)

    def _note(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, PullProgress):
                self.pulls[event.name] = event
            elif isinstance(event, Pulled):
                self.pulls.pop(event.name, None)
                self.say(f"{event.name} is installed")
            elif isinstance(event, PullFailed):
                self.pulls.pop(event.name, None)
                self.say(f"{event.name}: {event.message}", problem=True)
            elif isinstance(event, Damaged):
                self.say(event.message, problem=True)
            elif isinstance(event, Ready):
                self._interval.spare = event.card.spare_cpus > 0
                if self._watch is not None:
                    self._watch.begin(event.card.machine.backend)
                self.draw_metrics(force=True)
                self.call_after_refresh(parser)  # made now, not with the first answer's first words

    @property
    def chat(self) -> ChatScreen | None:
        """The chat's screen, also when another one is on top."""
        return next((screen for screen in self.screen_stack if isinstance(screen, ChatScreen)), None)

    # -- what the screens ask for ----------------------------------------------------------------------------------

    def say(self, text: str, *, problem: bool = False) -> None:
        """A short message in the corner. Never parsed as markup."""
        if (now := time.monotonic()) >= self._said.get(text, 0.0):  # what stands there already is not said again
            self._said = {said: until for said, until in self._said.items() if until > now} | {text: now + _NOTICE_S}
            self.notify(sanitise(text), severity="error" if problem else "information", markup=False, timeout=_NOTICE_S)

    def clear_notifications(self) -> None:
        self._said.clear()
        super().clear_notifications()

    def open_session(self, session: Session | None) -> None:
        """Go on with a session, or begin a new one with the settings of the old."""
        old = self.conversation
        if session is None:
            kept = old.session
            session = self.store.create(model=kept.model, system=kept.system, sampling=kept.sampling)
        old.stop()
        old.close()
        self.conversation = Conversation(self.engine, self.store, session, context=self._context_limit)
        if session.model != old.session.model or self.engine.state in ("failed", "dead", "stopped"):
            self.conversation.load_model()
        if self.chat is not None:
            self.chat.conversation_changed()

    def compare(self, other: AnswerSetup) -> None:
        """See `ChatApp`."""
        from headrace.app.chat.comparison import Comparison
        from headrace.app.tui.screens.compare_screen import CompareScreen

        try:
            self.comparison = Comparison(self.conversation, other, self._second_engine, context=self._context_limit)
        except HeadraceError as error:
            self.say(str(error), problem=True)
        else:
            self._compare_screen = CompareScreen(self, self.comparison)
            self.push_screen(self._compare_screen)

    def end_comparison(self, side: Side | None) -> None:
        """See `ChatApp`."""
        if self.comparison is None:
            return
        self.comparison.take(side)
        self.comparison = self._compare_screen = None
        self.pop_screen()
        if self.engine.card is not None:
            met(self.metrics, self.engine.card, self.metrics.machine)
        else:
            self.metrics.loading("starting the engine", None)
        self.metrics.session_changed(stored_turns(self.conversation.messages))
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
            self.say(str(error), problem=True)
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

    def action_show_keys(self) -> None:
        from headrace.app.tui.screens.help_screen import HelpScreen

        if not isinstance(self.screen, HelpScreen):
            self.push_screen(HelpScreen())

    def export_session(self, session_id: str, name: str) -> None:
        """See `ChatApp`."""
        from headrace.app.sessions.export import to_document, to_markdown

        own = f"headrace-{session_id}.md"
        try:
            path = Path(name or own).expanduser()
        except RuntimeError:
            raise UsageError(f"cannot write {name}: nobody has that home") from None
        if os.path.lexists(path) and path != Path(own):
            raise UsageError(f"{path} exists already", "another name, or none, writes another file")
        if session_id == self.conversation.session.id:
            self.conversation.settle()
        session = self.store.session(session_id)
        if path.suffix == ".json":
            text = (
                json.dumps(to_document(session, self.store.messages(session_id)), indent=2, ensure_ascii=False) + "\n"
            )
        else:
            text = to_markdown(session, self.store.branch(session_id))
        self._write(path, text)

    def _write(self, path: Path, text: str) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            self.say(f"cannot write {path}: {error.strerror}", problem=True)
        else:
            self.say(f"wrote {path}")
