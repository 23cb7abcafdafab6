"""An app that polls: ten times a second (see `app.tui.poll_interval`) it takes in what the engine's process said, and
lets the screen that is on top draw its text; figures, and the colours of code, follow less often.

Nothing is called per token.
"""

import asyncio
import time
from typing import TYPE_CHECKING

from textual.app import App

from headrace.app.answer.phrases import sampling_text
from headrace.app.chat.conversation import Conversation
from headrace.app.config.kv_option import PACKED
from headrace.app.engine.client import ChatEngine
from headrace.app.engine.events import (
    Damaged,
    Delta,
    Event,
    PeakMeasured,
    Pulled,
    PullFailed,
    PullProgress,
    Ready,
    one_line,
)
from headrace.app.output.sanitise import sanitise
from headrace.app.tui.metrics.feed import feed, stored_turns
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.metrics.machine_watch import MachineWatch
from headrace.app.tui.poll_interval import PollInterval
from headrace.app.tui.screens.chat_screen import ChatScreen
from headrace.app.tui.screens.decode_screen import DecodeScreen
from headrace.app.tui.textual_overrides.partial_repaint import FrugalScreen
from headrace.app.tui.transcript.markdown_lines import parser
from headrace.app.tui.widgets.status_bar import Status
from headrace.runtime.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.app.chat.parallel_answers import ParallelAnswers
    from headrace.app.tui.screens.again_screen import AgainScreen
    from headrace.app.tui.screens.compare_screen import CompareScreen

_NOTICE_S = 4.0  # a short message shows so long
_FIRST_METRICS_S = 0.4  # after a phase began there is something to say


class PolledApp(App[None]):
    """engine, conversation: what is polled. comparison: polled in the place of the conversation while there is one.

    frozen: the metrics that show in the place of those that go on. pulls: the downloads under way, by name.
    """

    def __init__(self, engine: ChatEngine, conversation: Conversation, watch: MachineWatch | None) -> None:
        super().__init__()
        self.engine = engine
        self.conversation = conversation
        self.comparison: ParallelAnswers | None = None
        self.metrics = LiveMetrics()
        self.frozen: LiveMetrics | None = None
        self.pulls: dict[str, PullProgress] = {}
        self._compare_screen: CompareScreen | AgainScreen | None = None
        self._left = False
        self._said: dict[str, float] = {}  # short messages, and until when they show
        self._metrics_due = 0.0
        self._metrics_of = ""  # the session they are of
        self._drawn_version = -1
        self._drawn_phase: object = None
        self._drawn_load: object = None
        self._drawn_sides: object = None  # what the answers side by side are doing
        self._text_waits = False  # some of theirs is not on the screen yet
        self._watch = watch
        self._interval = PollInterval()

    async def _poll(self) -> None:
        """For as long as the app lives: take in and draw, then rest."""
        while not self._left:
            self._interval.begin()
            self.tick()
            if isinstance(self.screen, FrugalScreen):
                self.screen.draw()
            phase = (self.comparison or self.conversation).phase
            await asyncio.sleep(self._interval.wait_s(awaiting=phase in ("waiting", "prefill")))

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
            self.metrics.set_load(load)
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
                chat.update_status()
            self.draw_metrics()

    def _compare_tick(self, comparison: "ParallelAnswers") -> None:
        """The same while answers stand side by side."""
        heard = comparison.poll()
        events = [event for _, event in heard]
        self._meet_several(comparison)
        feed(self.metrics, events if comparison.ids else [event for event in events if isinstance(event, PeakMeasured)])
        self._note(events)
        if self._watch is not None and (load := self._watch.look(time.monotonic())) is not None:
            self.metrics.set_load(load)
        doing = (comparison, *(side.phase for side in comparison.answers))
        changed, self._drawn_sides = doing != self._drawn_sides, doing
        figures = (now := time.perf_counter()) >= self._metrics_due or changed
        if (screen := self._compare_screen) is not None:
            screen.hear(heard)
            if figures or not all(isinstance(one, Delta) for one in events):
                self._draw_sides(screen)
            elif events or self._text_waits:
                self._draw_text_of_sides(screen)
        if figures:
            self._metrics_due = now + self._interval.metrics_s
            self._interval.with_figures()
            if isinstance(self.screen, DecodeScreen):
                self.draw_metrics()

    def _draw_text_of_sides(self, screen: "CompareScreen | AgainScreen") -> None:
        """No more than text came: add it to the lines that grow, or let it wait until text may be laid out anew."""
        if screen.extend_last_line():
            self._text_waits = False
            self._interval.quick()
        elif self._interval.whole_due:
            self._draw_sides(screen)
        else:
            self._text_waits = True

    def _draw_sides(self, screen: "CompareScreen | AgainScreen") -> None:
        self._text_waits = False
        self._interval.whole()
        screen.sync()

    def _meet_several(self, comparison: "ParallelAnswers") -> None:
        """The metrics are of these from now on, if they grow at the same time."""
        batch = self.metrics.batch
        if comparison.ids and (batch is None or batch.ids != comparison.ids):
            self.metrics.several(comparison.ids)

    def _text_alone(self, events: list[Event], chat: ChatScreen, *, figures: bool) -> bool:
        """Whether no more than text came, and shows already, or can wait until text is laid out anew."""
        if figures or self.conversation.phase != "answering" or not all(isinstance(one, Delta) for one in events):
            return False
        if chat.extend_last_line():
            self._interval.quick()
            return True
        return not self._interval.whole_due

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

    def status(self) -> Status:
        """What the line at the top says."""
        talk = self.conversation
        name = self.metrics.model.name or talk.session.model or ""
        card = talk.engine.card
        packed = f"K/V {card.kv}  " if card and card.kv in PACKED else ""
        how = tuple(f"{packed}{sampling_text(talk.effective, short=short)}" for short in (False, True))
        return Status(sanitise(name), sanitise(talk.session.title), talk.branch.context_tokens, talk.context_limit, how)

    def say(self, text: str, *, problem: bool = False) -> None:
        """A short message in the corner. Never parsed as markup."""
        if (now := time.monotonic()) >= self._said.get(text, 0.0):  # what stands there already is not said again
            self._said = {said: until for said, until in self._said.items() if until > now} | {text: now + _NOTICE_S}
            self.notify(sanitise(text), severity="error" if problem else "information", markup=False, timeout=_NOTICE_S)

    def refuse(self, error: HeadraceError) -> None:
        """Say what cannot be done, and what can."""
        self.say(one_line(str(error), error.hint), problem=True)

    def clear_notifications(self) -> None:
        self._said.clear()
        super().clear_notifications()
