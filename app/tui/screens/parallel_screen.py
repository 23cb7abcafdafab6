"""Parallel answers: panes with metrics and text, shared by the screens of /compare and /again.

    ParallelScreen -> AnswerPane per answer -> FigureLines (three lines) above a Transcript

Each pane has metrics of its own, fed with the events of its answer alone. The poller calls `handle_events`, then
`extend_last_line` or `sync`.

Guard: tests/tui/screens/test_compare_screen.py.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Static

from headrace.app.answer.first_pass import first_pass_text
from headrace.app.answer.phrases import ENDINGS, mbu_text
from headrace.app.answer.repetition import REPEATS
from headrace.app.chat.parallel_answers import ParallelAnswer
from headrace.app.engine.events import Event
from headrace.app.output.sanitise import sanitise
from headrace.app.sessions.records import Draft, Message
from headrace.app.tui.metrics.facts import TurnFigures, stored_turns
from headrace.app.tui.metrics.live import LiveMetrics
from headrace.app.tui.metrics.rates import totals_of
from headrace.app.tui.screens.chat_state import ChatState
from headrace.app.tui.screens.notices import Notice
from headrace.app.tui.textual_overrides.partial_repaint import use_partial_repaint
from headrace.app.tui.textual_overrides.single_dismissal import SingleDismissal
from headrace.app.tui.transcript.context_mark import pending_answer
from headrace.app.tui.transcript.entry import MessageState
from headrace.app.tui.transcript.transcript import Transcript
from headrace.app.tui.widgets.lines import Lines, bar, spread
from headrace.runtime.metrics.units import percent, three_digits, times

if TYPE_CHECKING:
    from headrace.app.chat.parallel_answers import ParallelAnswers, ParallelEvent

_BAR = 10  # cells
_BAR_FROM = 68  # cells of width from which a bar fits beside any figures, so that both panes have one or none
_FASTER = 1.05  # ratio from which a difference is more than noise
_NO_FIGURES = LiveMetrics().so_far  # of an answer that has not begun


class FigureLines(Lines):
    """Three lines: speed, time to first token and MBU, tokens and context."""

    def __init__(self, metrics: LiveMetrics) -> None:
        super().__init__(metrics)
        self._state: tuple[str, str] = ("", "")
        self._figures = _NO_FIGURES
        self._other: tuple[str, TurnFigures] | None = None
        self._context_fill: tuple[int, int | None] = (0, None)  # its tokens, and their limit

    def set_figures(
        self,
        state: tuple[str, str],
        figures: TurnFigures,
        other: tuple[str, TurnFigures] | None,
        context: tuple[int, int | None],
    ) -> None:
        """Draw other values.

        state: text and style.
        figures: of this answer.
        other: name and figures of the answer to compare with; None: there is none.
        context: its tokens, and their limit if it is known.
        """
        self._state = state
        self._figures = figures
        self._other = other
        self._context_fill = context
        self.show(self.metrics)

    def change_key(self, metrics: LiveMetrics) -> object:  # noqa: ARG002
        # The values of `set_figures`, not the metrics
        return self._state, self._figures, self._other, self._context_fill

    def lines(self, metrics: LiveMetrics, width: int, height: int) -> Sequence[Content]:  # noqa: ARG002
        figures = self._figures
        rate = Content.assemble((f"{three_digits(figures.tokens_per_second)}", "bold"), (" tok/s", "$quiet"))
        compared = rate + self._ratio()
        state = Content.styled(*self._state)
        if state.cell_length + compared.cell_length + 2 > width:
            compared = rate
        named = " token" if figures.completion_tokens == 1 else " tokens"
        output = Content.assemble(f"{figures.completion_tokens:,}", (named, "$quiet"))
        stats = totals_of(metrics.answer.records)
        if stats.proposed:
            output = output.append(Content.assemble(f" {stats.tokens / stats.steps:.2f}", ("/step", "$quiet")))
        tokens, limit = self._context_fill
        context = Content.assemble(("context ", "$quiet"), f"{tokens:,}")
        if limit:
            context = context.append(Content.styled(f" / {limit:,}", "$quiet"))
        return [spread(state, compared, width), self._ttft(width), spread(output, context, width)]

    def _ttft(self, width: int) -> Content:
        """Return the line of TTFT, cached prompt tokens and MBU, as much as fits."""
        figures = self._figures
        mbu = mbu_text(figures.mbu, busy=figures.busy)
        share = Content.assemble(("MBU ", "$quiet"), f"{mbu:>5}")
        if width >= _BAR_FROM:
            share = Content.assemble(share, " ", bar(figures.mbu or 0.0, _BAR, "$primary"))
        seconds = "–" if figures.ttft_s is None else f"{figures.ttft_s:.2f} s"
        ttft = Content.assemble(("TTFT ", "$quiet"), seconds)
        cached = f", {figures.reused_tokens:,} of {figures.prompt_tokens:,} cached"
        if figures.reused_tokens and ttft.cell_length + len(cached) + share.cell_length < width:
            ttft = ttft.append(Content.styled(cached, "$quiet"))
        return spread(ttft, share, width)

    def _ratio(self) -> Content:
        """Return the speed relative to the other answer's."""
        if self._other is None or self._figures.tokens_per_second is None:
            return Content("")
        name, other = self._other
        if not other.tokens_per_second:
            return Content("")
        ratio = self._figures.tokens_per_second / other.tokens_per_second
        style = "bold $text-success" if ratio >= _FASTER else "$quiet"
        return Content.styled(f"  {times(ratio)} {name}", style)


class AnswerPane(Vertical):
    """A pane; `sync` brings it up to date."""

    def __init__(
        self, side: ParallelAnswer, first: int, chat_metrics: LiveMetrics, title: Callable[[ParallelAnswer], str]
    ) -> None:
        """Make the pane of an answer.

        side: the answer.
        first: index of the first message to show.
        chat_metrics: the chat's, for facts about the machine and its load.
        title: returns the title of an answer's pane.
        """
        super().__init__(id=f"side-{side.name.lower()}")
        self.side = side
        self.metrics = LiveMetrics()
        self._first = first
        self._chat_metrics = chat_metrics
        self._title = title
        self._card: object = None  # the one that the metrics have
        self._shown_title = ""
        self._shown: Message | None = None  # the last message as it is on the screen

    def compose(self) -> ComposeResult:
        yield FigureLines(self.metrics)
        yield Transcript()

    @property
    def transcript(self) -> Transcript:
        return self.query_one(Transcript)

    @property
    def figures(self) -> TurnFigures:
        """The stored metrics of a finished answer, else the live ones."""
        if self.side.turn is None:
            stored = stored_turns(self.side.messages[-1:])
            return stored[0] if stored else _NO_FIGURES
        if self.side.phase == "waiting":
            return _NO_FIGURES
        # The load is sampled for the chat's metrics alone.
        return replace(self.metrics.so_far, busy=self._chat_metrics.contention is not None)

    def _drop_earlier_figures(self) -> None:
        """Drop the figures of an earlier answer while this one waits."""
        live = self.metrics
        if self.side.phase in ("queued", "loading", "waiting") and (live.answer.records or live.answer.prefill_total):
            live.session_changed([])

    def handle_event(self, event: Event) -> None:
        self._take_card()
        self.metrics.take([event])

    def extend_last_line(self) -> bool:
        """Draw text that only extends the last line; return False if a layout is needed."""
        last = self.side.messages[-1] if self.side.messages else None
        if last is self._shown or not self.display or not self.transcript.display:  # nothing to draw
            return True
        if last is None or not self.transcript.extend_last_line(last):
            return False
        self._shown = last
        return True

    def sync(self, other: "AnswerPane | None" = None) -> None:
        """Draw all changes. other: the pane to compare with."""
        self._take_card()
        self._drop_earlier_figures()
        side = self.side
        messages = list(side.messages[self._first :])
        self._shown = side.messages[-1] if side.messages else None
        # An answer without text is no message yet. `turn` remains after the end until the answer is stored.
        if (side.phase != "idle" or side.turn is not None) and (not messages or messages[-1].role == "user"):
            messages.append(pending_answer())
        message_states = [MessageState() for _ in messages]
        if side.phase != "idle" and messages:
            waiting, _ = self._state_text()
            message_states[-1] = MessageState(growing=True, waiting=waiting)
        self.transcript.show(messages, message_states)
        self.transcript.highlight_code()
        compared = None
        if other is not None and side.phase == other.side.phase == "idle":  # the figures of both are final
            compared = (other.side.name, other.figures)
        limit = side.card.context_limit if side.card is not None else None
        self.query_one(FigureLines).set_figures(
            self._state_text(), self.figures, compared, (side.branch.context_tokens, limit)
        )
        title = self._title(side)
        if title != self._shown_title:
            self._shown_title = title
            self.border_title = Content(sanitise(title))

    def _take_card(self) -> None:
        """Pass a newly loaded model on to the metrics."""
        if self.side.card is not None and self.side.card is not self._card:
            self._card = self.side.card
            self.metrics.use_model(self.side.card, self._chat_metrics.machine)

    def _state_text(self) -> tuple[str, str]:
        """Return the answer's state as text and style."""
        side = self.side
        metrics = self.metrics
        if side.phase == "queued":
            return "… queued", "$quiet"
        if side.phase == "loading":
            stage = sanitise(metrics.load_stage) or "starting the engine"
            return f"◌ {stage} {percent(metrics.load_share)}".rstrip(), "$text-accent"
        if side.phase in ("waiting", "prefill"):
            answer = metrics.answer
            slow = metrics.first_pass
            if slow is not None:
                return f"◌ {first_pass_text(slow.seconds)}", "$text-accent"
            if not answer.prefill_total:
                return "◌ prefill", "$text-accent"
            return f"◌ prefill: {answer.prefill_done} of {answer.prefill_total} tokens", "$text-accent"
        if side.phase == "answering":
            return "● answering", "bold $text-success"
        if side.notice is not None:
            return f"✗ {sanitise(side.notice)}", "$text-error"
        if not side.messages:
            return "no question yet", "$quiet"
        if side.answer is None:
            return "no answer", "$quiet"
        if side.answer.finish_reason is None and not side.answer.partial:
            return "✎ edited by hand", "$quiet"
        if side.answer.finish_reason == "stop":
            return "✓ done", "$quiet"
        return " ".join(ENDINGS.get(side.answer.finish_reason or "", ENDINGS["cancelled"])), "$quiet"


class ParallelScreen(SingleDismissal, Screen[Draft]):
    """A head, one pane per answer, and a notice; the app polls the answers.

    Subclasses compose the widgets, arrange the panes, and define `head`, `keys_state` and `sync_panes`. They may
    override `scrolled` and `typed`. The screen is dismissed with the text of `typed`.
    """

    def __init__(self, state: ChatState, answers: "ParallelAnswers", panes: Sequence[AnswerPane]) -> None:
        super().__init__()
        use_partial_repaint(self)
        self.state = state
        self.answers = answers
        self.panes = list(panes)
        self._drawn_keys_state: object = None  # `keys_state` at the latest drawing

    def on_mount(self) -> None:
        for pane in self.panes:
            pane.transcript.show_thinking = self.state.settings.chat.show_thinking
        self.call_after_refresh(self.sync)

    @property
    def head(self) -> str:
        """Text of the first line; its part before the first " · " is drawn bold."""
        raise NotImplementedError

    @property
    def keys_state(self) -> object:
        """State that the available keys depend on."""
        raise NotImplementedError

    @property
    def scrolled(self) -> Sequence[AnswerPane]:
        """The panes that the scroll keys move."""
        return self.panes

    # -- drawing ---------------------------------------------------------------------------------------------------

    def handle_events(self, events: "Sequence[ParallelEvent]") -> None:
        """Take in engine events; draws nothing."""
        for side, event in events:
            for pane in self.panes:
                if pane.side is side:
                    pane.handle_event(event)

    def extend_last_line(self) -> bool:
        """Draw text that only extends last lines; return False if a pane needs a layout."""
        late = [pane for pane in self.panes if not pane.extend_last_line()]
        return not late

    def sync(self) -> None:
        """Draw all changes."""
        if not self.is_mounted or not self.query(Notice):  # before the widgets are there, or after they are gone
            return
        self.sync_panes()
        if self.keys_state != self._drawn_keys_state:
            self._drawn_keys_state = self.keys_state
            self.refresh_bindings()
        width = max(4, self.size.width - 2)
        head = self.query_one("#parallel-head", Static)
        name, gap, rest = self.head.partition(" · ")
        line = Content.assemble((name, "bold $text-primary"), (gap + rest, "$quiet"))
        line = line.truncate(width, ellipsis=True)
        if str(head.render()) != line.plain:
            head.update(line)
        refused = [f"{pane.side.name}: {pane.side.notice}" for pane in self.panes if pane.side.notice is not None]
        refused += [f"{pane.side.name}: {REPEATS}; Esc stops it" for pane in self.panes if pane.side.repeats]
        self.query_one(Notice).show(" · ".join(filter(None, [self.answers.notice, *refused])))

    def sync_panes(self) -> None:
        """Call `AnswerPane.sync` for the panes that show."""
        raise NotImplementedError

    @property
    def typed(self) -> Draft:
        """Text that was typed here and not sent; the chat's prompt takes it."""
        return Draft()

    # -- keys ------------------------------------------------------------------------------------------------------

    def action_think(self) -> None:
        for pane in self.panes:
            pane.transcript.show_thinking = not pane.transcript.show_thinking

    def action_scroll_text(self, where: str) -> None:
        for pane in self.scrolled:
            pane.transcript.scroll_text(where)

    def leave(self, side: "ParallelAnswer | None") -> None:
        """Return to the chat with this answer; None: as before. After an error the screen stays open."""
        if self.state.attempt(lambda: self.state.end_comparison(side)):
            self.dismiss(self.typed)
