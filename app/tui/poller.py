"""The polling loop: takes in engine events and draws what changed, about ten times a second.

Text comes ten times a second, less often while nothing is asked, metrics once or twice. Without a spare core, work of
the chat's process delays a kernel thread, and the others wait for it. Then expensive layouts (a long table) become
rarer, so that they take a fixed share of a core, and metrics are drawn half as often. Nothing is called per token.

    tick: conversation.poll() -> LiveMetrics.take -> the chat's screen: `extend_last_line`, else `sync`
                              -> once or twice a second the figures: status bar, decode view

tests/tui/test_poller.py has the intervals, test_text_flow.py their effect on the screen.
"""

import asyncio
import gc
import time
from typing import TYPE_CHECKING

from textual.app import App

from headrace.app.engine.events import Damaged, Delta, Event, PeakMeasured, PullEvent, Ready
from headrace.app.output.markdown_parser import parser
from headrace.app.tui.metrics.facts import stored_turns
from headrace.app.tui.metrics.machine_watch import MachineWatch
from headrace.app.tui.screens.chat_screen import ChatScreen
from headrace.app.tui.screens.chat_state import ChatState
from headrace.app.tui.screens.decode_screen import DecodeScreen
from headrace.app.tui.screens.parallel_screen import ParallelScreen

if TYPE_CHECKING:
    from headrace.app.chat.parallel_answers import ParallelAnswers

SHORTEST_S = 0.095  # between polls; longer than `engine.outbox.TEXT_S`, so that each finds text
AWAITING_S = 0.05  # before an answer's first token
_IDLE = 1.6  # times SHORTEST_S: between polls while nothing is asked
_LONGEST_S = 0.38  # on a slow machine: rarer text would stutter
_LAYOUT_SHARE = {True: 0.1, False: 0.01}  # of a core that layouts take, by `spare`
_SLACK_S = 0.01  # tolerated earliness of a poll
_METRICS_S = {True: 0.5, False: 1.0}  # between two drawings of the decode view
_FIRST_METRICS_S = 0.4  # until the first figures of a phase are drawn


class PollInterval:
    """The seconds between polls and between layouts of text, by the processor time that drawing takes.

    Call `begin` before a poll, `drawn` once its changes are on the screen, then sleep `wait_s`. In between, note what
    the poll draws: a layout (`lays_out`), or anything cheaper (`has_other_cost`). Only layouts are measured.
    """

    def __init__(self) -> None:
        self.spare = True
        """True if decoding leaves a core free."""
        self._began: float | None = None  # processor time at the poll; None if its cost is not to be measured
        self._polled_at = 0.0  # time of the poll
        self._laid_out_at = 0.0  # time of the latest layout
        self._cost_s = 0.0  # of a poll and its drawing, a moving average

    @property
    def metrics_s(self) -> float:
        """Seconds between two drawings of the decode view."""
        return _METRICS_S[self.spare]

    def begin(self) -> None:
        """Start a poll."""
        self._began = time.process_time()
        self._polled_at = time.monotonic()

    def lays_out(self) -> None:
        """Note that this poll lays out text again."""
        self._laid_out_at = self._polled_at

    def has_other_cost(self) -> None:
        """Note that this poll's cost is not that of a layout: it extends a line of text, or draws metrics."""
        self._began = None

    def drawn(self) -> None:
        """Measure the poll's cost at the first drawing after `begin`."""
        if self._began is not None:
            self._cost_s += 0.5 * (time.process_time() - self._began - self._cost_s)
            self._began = None

    def wait_s(self, *, awaiting: bool, idle: bool = False) -> float:
        """Return the seconds to sleep.

        awaiting: a request has no text yet.
        idle: nothing is asked.
        """
        if awaiting:
            interval = min(AWAITING_S, SHORTEST_S)
        elif idle:
            interval = SHORTEST_S * _IDLE
        else:
            interval = SHORTEST_S
        return max(0.0, self._polled_at + interval - time.monotonic())

    @property
    def layout_s(self) -> float:
        """Seconds between two layouts of text."""
        return max(SHORTEST_S, min(self._cost_s / _LAYOUT_SHARE[self.spare], _LONGEST_S))

    @property
    def layout_due(self) -> bool:
        """True if text may be laid out again."""
        return time.monotonic() >= self._laid_out_at + self.layout_s - _SLACK_S


class Poller:
    """Polls the conversation, or the comparison while there is one. watch: machine load, if it is to be shown."""

    def __init__(self, app: App[None], state: ChatState, watch: MachineWatch | None) -> None:
        self.interval = PollInterval()
        self.watch = watch
        self._app = app
        self._state = state
        self._metrics_due = 0.0
        self._metrics_session = ""  # id of the session the metrics belong to
        self._drawn_metrics: object = None  # version and load as they were drawn
        self._drawn_phases: object = None
        self._text_waits = False  # parallel answers have text that is not on the screen yet

    async def run(self) -> None:
        """Poll and draw until the chat is closed."""
        state = self._state
        while not state.closed:
            self.interval.begin()
            self.tick()
            phase = (state.comparison or state.conversation).phase
            awaiting = phase in ("waiting", "prefill")
            await asyncio.sleep(self.interval.wait_s(awaiting=awaiting, idle=phase == "idle"))

    def tick(self) -> None:
        """Take in the events since the last call and mark changes for drawing."""
        if self._state.closed:
            return
        if self._state.comparison is not None:
            self._poll_comparison(self._state.comparison)
        else:
            self._poll_conversation()

    # -- one conversation ------------------------------------------------------------------------------------------

    def _poll_conversation(self) -> None:
        """Take in the conversation's events, then draw text, and the figures if they are due."""
        state = self._state
        metrics = self._state.metrics
        events = state.conversation.poll()
        metrics.take(events)
        if self._metrics_session != state.conversation.session.id:
            self._metrics_session = state.conversation.session.id
            metrics.session_changed(stored_turns(state.conversation.messages))
        metrics.set_context(state.conversation.branch.context_tokens)
        self._handle_events(events)
        state.use_fetched()
        figures, changed = self._figures_due(metrics.phase)
        chat = self.chat
        if chat is not None and not (events and self._extend_text(events, chat, figures=figures)):
            self.interval.lays_out()
            chat.view.sync(events)
        if figures:
            self._metrics_due = time.perf_counter() + (_FIRST_METRICS_S if changed else self.interval.metrics_s)
            self.interval.has_other_cost()
            if chat is not None:
                chat.view.transcript.highlight_code()
                chat.view.update_status()
            self.draw_metrics()

    def _extend_text(self, events: list[Event], chat: ChatScreen, *, figures: bool) -> bool:
        """Return True if only text came, and it is on the screen or can wait for the next layout."""
        if figures or self._state.conversation.phase != "answering" or not _only_text(events):
            return False
        if chat.view.extend_last_line():
            self.interval.has_other_cost()
            return True
        return not self.interval.layout_due

    # -- parallel answers ------------------------------------------------------------------------------------------

    def _poll_comparison(self, comparison: "ParallelAnswers") -> None:
        """Do the same with parallel answers, each of which has a pane with metrics of its own.

        The answers of /again have ids: they are one turn of the chat's metrics, too. Those of /compare have none.
        """
        metrics = self._state.metrics
        answer_events = comparison.poll()
        events = [event for _, event in answer_events]
        if comparison.ids and metrics.answers.ids != comparison.ids:
            metrics.begin_batch(comparison.ids)
        if comparison.ids:
            metrics.take(events)
        else:  # each pane has metrics for its own model
            metrics.take([event for event in events if isinstance(event, PeakMeasured)])
        self._handle_events(events)
        figures, _ = self._figures_due((comparison, *(side.phase for side in comparison.answers)))
        if (screen := self._parallel_screen) is not None:
            screen.handle_events(answer_events)
            if figures or not _only_text(events):
                self._draw_parallel(screen)
            elif events or self._text_waits:
                self._draw_parallel_text(screen)
        if figures:
            self._metrics_due = time.perf_counter() + self.interval.metrics_s
            self.interval.has_other_cost()
            if isinstance(self._app.screen, DecodeScreen):
                self.draw_metrics()

    def _draw_parallel_text(self, screen: ParallelScreen) -> None:
        """Extend the last lines, or wait until text may be laid out again."""
        if screen.extend_last_line():
            self._text_waits = False
            self.interval.has_other_cost()
        elif self.interval.layout_due:
            self._draw_parallel(screen)
        else:
            self._text_waits = True

    def _draw_parallel(self, screen: ParallelScreen) -> None:
        self._text_waits = False
        self.interval.lays_out()
        screen.sync()

    # -- both ------------------------------------------------------------------------------------------------------

    def _figures_due(self, phases: object) -> tuple[bool, bool]:
        """Return whether metrics are to be drawn now, and whether the phase changed."""
        changed = phases != self._drawn_phases
        self._drawn_phases = phases
        return time.perf_counter() >= self._metrics_due or changed, changed

    def draw_metrics(self, *, force: bool = False) -> None:
        """Draw the decode view if it shows and its metrics changed."""
        shown = self._state.shown_metrics
        drawn = shown.version, shown.load
        if drawn == self._drawn_metrics and not force:
            return
        self._drawn_metrics = drawn
        if isinstance(screen := self._app.screen, DecodeScreen):
            screen.show(shown, self._state.status, frozen=self._state.frozen is not None)
        elif isinstance(screen, ChatScreen):
            screen.view.show_metrics()

    def _handle_events(self, events: list[Event]) -> None:
        """Handle downloads, damage, a loaded model; look at the machine."""
        state = self._state
        for event in events:
            if isinstance(event, PullEvent):
                state.handle_pull(event)
            elif isinstance(event, Damaged):
                state.notify(event.message, problem=True)
            elif isinstance(event, Ready):
                self.interval.spare = event.card.spare_cpus > 0
                if self.watch is not None:
                    self.watch.begin(event.card.machine.backend)
                self.draw_metrics(force=True)
                self._app.call_after_refresh(_import_for_answers)
        if self.watch is not None:
            load = self.watch.sample_if_due(time.monotonic())
            if load is not None:
                state.metrics.set_load(load)

    @property
    def chat(self) -> ChatScreen | None:
        """The chat screen, also below another one."""
        return next((screen for screen in self._app.screen_stack if isinstance(screen, ChatScreen)), None)

    @property
    def _parallel_screen(self) -> ParallelScreen | None:
        return next((screen for screen in self._app.screen_stack if isinstance(screen, ParallelScreen)), None)


def _import_for_answers() -> None:
    """Import what the first answer needs, before it comes."""
    import headrace.models.text.events  # noqa: F401 - the classes in every `Delta`

    parser()
    gc.freeze()  # as after the start of the app


def _only_text(events: list[Event]) -> bool:
    """Return True if nothing came but text of answers."""
    return all(isinstance(event, Delta) for event in events)
