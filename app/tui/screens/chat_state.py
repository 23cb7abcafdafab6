"""State shared by the app and its screens: engine, store, conversation, metrics, parallel answers.

No widget is kept here, and nothing is drawn but notifications: screens draw what they find with the next poll. Only
`open_session` replaces `conversation`, so screens read it anew each time.

Guards: tests/tui/test_chat.py, and tests/tui/screens for their use on screens.
"""

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from textual.app import App

from headrace.app.answer.phrases import sampling_in_effect
from headrace.app.chat.commands import export_session
from headrace.app.chat.conversation import Conversation
from headrace.app.chat.parallel_answers import ParallelAnswer
from headrace.app.chat.session_branch import new_session
from headrace.app.config.load_options import PACKED
from headrace.app.config.settings import Settings
from headrace.app.engine.client import ChatEngine
from headrace.app.engine.commands import TIMED_EVERY
from headrace.app.engine.events import Pulled, PullEvent, PullProgress, one_line
from headrace.app.output.sanitise import sanitise
from headrace.app.sessions.records import Draft, Session
from headrace.app.tui.input.platform_tools import copy_with_tool
from headrace.app.tui.metrics.facts import stored_turns
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.widgets.status_bar import Status
from headrace.runtime.config.files import replace_file
from headrace.runtime.config.paths import data_dir
from headrace.runtime.errors import DeletedError, HeadraceError, SessionError

if TYPE_CHECKING:
    from headrace.app.chat.parallel_answers import ParallelAnswers

NOTIFICATION_S = 4.0  # long enough to read one or two lines


class ChatState:
    """One engine, one conversation at a time, and the operations that every screen offers.

    conversation: the open one.
    comparison: polled instead of the conversation while it is not None.
    metrics: of the conversation.
    frozen: metrics shown instead of the live ones.
    pulls: downloads in progress, by name.
    failed_pulls: reasons of failed downloads, by name, until they are tried again.
    awaited: the model that is loaded once it is fetched.
    fetched: the same once it is there.
    times_all_steps: every decode step is timed by part, else a sample.
    unsent: returns the text that is typed and not sent; None until there is a prompt.
    closed: the chat was left.
    store_error: the error that leaving the chat met.
    """

    def __init__(
        self,
        app: App[None],
        conversation: Conversation,
        *,
        settings: Settings,
        second_engine: Callable[[], ChatEngine],
    ) -> None:
        """Begin with a conversation.

        app: for messages to the user.
        conversation: the first one.
        settings: of the user.
        second_engine: makes the engine of a second model.
        """
        self._app = app
        self.engine = conversation.engine
        self.store = conversation.store
        self.settings = settings
        self.second_engine = second_engine
        self.conversation = conversation
        self.comparison: ParallelAnswers | None = None
        self.metrics = LiveMetrics()
        self.frozen: LiveMetrics | None = None
        self.pulls: dict[str, PullProgress] = {}
        self.failed_pulls: dict[str, str] = {}
        self.awaited: str | None = None
        self.fetched: str | None = None
        self.times_all_steps = False
        self.unsent: Callable[[], Draft] | None = None
        self.closed = False
        self.store_error: SessionError | None = None
        self._preset_setup: tuple[str, dict[str, object]] | None = None  # system prompt and sampling of the session
        self._preset: str | None = None  # name of the preset with these, if there is one
        self._notification = ""  # the latest one
        self._notification_end = 0.0  # monotonic clock when it disappears

    @property
    def shown_metrics(self) -> LiveMetrics:
        return self.frozen or self.metrics

    @property
    def status(self) -> Status:
        """Contents of the status bar."""
        conversation = self.conversation
        card = conversation.engine.card
        formats = ""
        if card is not None and card.kv in PACKED:
            formats += f"K/V {card.kv}  "
        if card is not None and card.activations != 16:
            formats += f"activations {card.activations}  "
        sampling = [sampling_in_effect(conversation.effective, short=short) for short in (False, True)]
        return Status(
            model=sanitise(self.metrics.model.name or conversation.session.model or ""),
            title=sanitise(conversation.session.title),
            tokens=conversation.branch.context_tokens,
            limit=conversation.context_limit,
            sampling=tuple(f"{formats}{text}" for text in sampling),
            marks=("not saved",) if self.store.unsaved is not None else (),
            instructions=self._instructions,
        )

    @property
    def _instructions(self) -> str:
        """The preset in force, by name, else a word on the system prompt."""
        session = self.conversation.session
        setup = (session.system, dict(session.sampling))
        if setup != self._preset_setup:  # the presets are read from a file
            self._preset_setup = setup
            self._preset = _preset_of(*setup)
        if self._preset is not None:
            return f"preset {sanitise(self._preset)}"
        return "system prompt" if session.system else ""

    def presets_changed(self) -> None:
        self._preset_setup = None

    # -- notifications ---------------------------------------------------------------------------------------------

    def notify(self, text: str, *, problem: bool = False) -> None:
        """Show a notification unless the same one is on the screen. Markup is not parsed."""
        now = time.monotonic()
        if text == self._notification and now < self._notification_end:
            return
        self._notification = text
        self._notification_end = now + NOTIFICATION_S
        self._app.notify(
            sanitise(text),
            severity="error" if problem else "information",
            markup=False,
            timeout=NOTIFICATION_S,
        )

    def show_error(self, error: HeadraceError) -> None:
        self.notify(one_line(str(error), error.hint), problem=True)

    def attempt(self, action: Callable[[], object]) -> bool:
        """Call `action`, and show its HeadraceError; return whether there was none."""
        try:
            action()
        except HeadraceError as error:
            self.show_error(error)
            return False
        return True

    def notifications_cleared(self) -> None:
        """Show the next notification even if it is the latest one again."""
        self._notification_end = 0.0

    # -- sessions and the engine -----------------------------------------------------------------------------------

    def keep_draft(self) -> None:
        """Store what is typed and not sent with the session, if it changed. Raises SessionError."""
        if self.unsent is not None:
            self.conversation.branch.set_draft(self.unsent() or Draft())

    def open_session(self, session: Session | None) -> None:
        """Open a session; None: create one with the settings of the open one, for the unsent text, too."""
        old = self.conversation
        old_session = old.session
        if session is None:
            session = new_session(self.store, old_session)
            self._move_draft(old, session)
        else:
            self.keep_draft()
        self.conversation = old.open(session)
        self._forget_awaited()
        if session.model != old_session.model or self.engine.state in ("failed", "dead", "stopped"):
            self.conversation.load_model()

    def _move_draft(self, old: Conversation, session: Session) -> None:
        """Store what is typed and not sent with a new session instead of that of the old conversation."""
        if self.unsent is not None:
            draft = self.unsent()
            if draft:
                self.store.set_draft(session.id, draft)
        with suppress(DeletedError):  # by another process
            old.branch.set_draft(Draft())

    def _forget_awaited(self) -> None:
        """Load no model when it is fetched: another one was chosen since."""
        self.awaited = None
        self.fetched = None

    def use_model(self, name: str) -> None:
        """Load a model for the next answer on. Raises HeadraceError."""
        self.conversation.set_model(name)
        self._forget_awaited()  # not before: a refusal leaves the download's model to be loaded
        self.metrics.loading(f"loading {name}", None)

    def fetch_and_use(self, name: str) -> None:
        """Fetch a model, then load it; the one that is loaded stays until then. Raises HeadraceError."""
        if self.engine.card is None:  # the download shows in the place of the conversation
            self.use_model(name)
            return
        if name not in self.pulls:
            self.engine.pull(name)
        self.awaited = name
        self.conversation.notice = None

    def use_fetched(self) -> None:
        """Load the awaited model once it is there and no answer is being written."""
        name = self.fetched
        if name is not None and self.conversation.phase == "idle":
            self.fetched = None  # a model that is refused is not tried again
            self.attempt(lambda: self.use_model(name))

    def handle_pull(self, event: PullEvent) -> None:
        """Follow a download to its end."""
        self.failed_pulls.pop(event.name, None)
        if isinstance(event, PullProgress):
            self.pulls[event.name] = event
            return
        self.pulls.pop(event.name, None)
        is_awaited = event.name == self.awaited
        if is_awaited:
            self.awaited = None
        if isinstance(event, Pulled):
            self.notify(f"{event.name} is installed")
            if is_awaited:
                self.fetched = event.name
            return
        reason = one_line(event.message, event.hint)
        self.failed_pulls[event.name] = reason
        self.notify(f"{event.name}: {reason}", problem=True)
        if is_awaited:  # a notification disappears
            self.conversation.notice = f"{event.name} is not fetched: {reason}"

    def restart_engine(self) -> None:
        """Start the engine again after it died or could not load a model."""
        if self.attempt(self.conversation.restart_engine):
            self.metrics.loading("starting the engine", None)

    def end_comparison(self, side: ParallelAnswer | None) -> None:
        """Continue the conversation with this answer, its model and settings; None: as before the comparison.

        Raises SessionError, and UsageError for an answer that cannot be taken.
        """
        ended = self.comparison
        if ended is None:
            return
        ended.take(side)
        self.comparison = None
        turns = stored_turns(self.conversation.messages)
        if ended.ids:  # the same model: its metrics stay
            self.metrics.set_turns(turns)
            return
        if self.engine.card is not None:
            self.metrics.use_model(self.engine.card, self.metrics.machine)
        else:
            self.metrics.loading("starting the engine", None)
        self.metrics.session_changed(turns)

    def close(self) -> None:
        """Store unfinished answers and stop the engine."""
        if self.closed:
            return
        self.closed = True
        try:
            # An error of one does not keep the others from being stored.
            for close in (self.keep_draft, self._close_comparison, self.conversation.close):
                try:
                    close()
                except SessionError as error:  # a full disk, a session deleted by another process
                    self.store_error = error
        finally:
            self.engine.close()

    def _close_comparison(self) -> None:
        if self.comparison is not None:
            self.comparison.close()

    def time_all_steps(self, every_one: bool) -> None:
        """Time every decode step by part, or a sample of them."""
        card = self.engine.card
        if card is not None and card.kernels.get("kernels") != "native":
            self.notify("only the CPU kernels can time the parts of a step: the times shown are computed", problem=True)
            return
        self.times_all_steps = every_one
        if every_one:
            self.engine.time_steps(1)
            self.notify("every step is timed by part")
        else:
            self.engine.time_steps(TIMED_EVERY)
            self.notify(f"1 step in {TIMED_EVERY} is timed by part")

    # -- clipboard and files ---------------------------------------------------------------------------------------

    def copy(self, text: str, what: str) -> None:
        """Copy text through the terminal and, in the background, the platform's tool. what: named in the message."""
        if not text:
            self.notify("nothing to copy", problem=True)
            return
        self._app.copy_to_clipboard(text)
        self._app.run_worker(lambda: copy_with_tool(text), thread=True, exit_on_error=False)
        self.notify(f"copied {what}: {len(text):,} characters")

    def export_session(self, session_id: str, name: str) -> None:
        """Write a session to a file; see `app.sessions.export.export_path` for `name`. Raises UsageError."""
        self.notify(export_session(self.conversation, session_id, name))

    def export_trace(self) -> None:
        """Write a trace-event file of the latest turn to the data folder."""
        from headrace.app.output.trace_file import trace
        from headrace.app.tui.metrics.traced import traced

        metrics = self.shown_metrics
        sequences = traced(metrics)
        if not sequences:
            self.notify("no steps yet: nothing to trace", problem=True)
            return
        about = {"model": metrics.model.name, "device": metrics.machine.name}
        text = json.dumps(trace(sequences, metrics.figures.mbu.base_gb_s, about)) + "\n"
        path = data_dir() / "exports" / time.strftime("trace-%Y%m%d-%H%M%S.json")
        try:
            replace_file(path, text)
        except OSError as error:
            self.notify(f"{path} cannot be written: {error.strerror}", problem=True)
        else:
            self.notify(f"wrote {path}")


def _preset_of(system: str, sampling: Mapping[str, object]) -> str | None:
    """Return the name of the preset with this system prompt and sampling, if there is one."""
    if not system and not sampling:
        return None
    from headrace.app.config.presets import load_presets  # not imported at the start

    try:
        presets = load_presets()
    except HeadraceError:  # reported by /preset
        return None
    for name, preset in presets.items():
        if preset.system == system and preset.sampling == sampling:
            return name
    return None
