"""Several answers to the last question as they grow, and one of them is taken. Esc stops all, then leaves.

As many panes as there is room for stand in a grid; of those that there is none for, the ones around the chosen show.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.content import Content
from textual.widgets import Static

from headrace.app.answer.phrases import rate_digits
from headrace.app.output.sanitise import sanitise
from headrace.app.tui.chat_app import ChatApp
from headrace.app.tui.screens.compare_pane import ComparePane
from headrace.app.tui.screens.notices import Notice
from headrace.app.tui.screens.scrolling import ScrollingScreen
from headrace.app.tui.transcript.transcript import Transcript
from headrace.app.tui.widgets.key_bar import KeyBar
from headrace.runtime.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.app.chat.candidates import Candidates
    from headrace.app.chat.parallel_answers import AnswerEvent

_WIDTH, _HEIGHT = 38, 9  # cells that a pane takes at least
_HEARD_WITHIN_S = 2.0  # a pass over many tokens of a prompt is not cut short
_AROUND = 3  # lines of the screen that are no panes


class CandidatePane(ComparePane):
    """A candidate; all have one model and one question, so that its number says who it is."""

    def _title(self) -> str:
        seed = self.side.setup.sampling.get("seed")
        return f"{self.side.name}" + (f" · seed {seed}" if seed is not None else "")


class AgainScreen(ScrollingScreen):
    """Candidates; the app polls them."""

    AUTO_FOCUS = ""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "stop", "Stop all", key_display="Esc", priority=True),
        Binding("escape", "leave", "Take none", key_display="Esc", priority=True),
        Binding("enter", "take", "Take this one", key_display="Enter", priority=True),
        *(Binding(str(n), f"choose({n - 1})", show=False, priority=True) for n in range(1, 9)),
        Binding("right,tab", "go(1)", "Next", key_display="→", priority=True),
        Binding("left,shift+tab", "go(-1)", "Previous", key_display="←", show=False, priority=True),
        Binding("f1", "app.show_keys", "Help", key_display="F1"),
        Binding("f2", "app.decode_view", "Figures", key_display="F2"),
        Binding("ctrl+c", "interrupt", show=False, priority=True),
        Binding("ctrl+t", "think", "Thinking", show=False),
        Binding("up", "scroll(-1)", show=False, priority=True),
        Binding("down", "scroll(1)", show=False, priority=True),
    ]

    def __init__(self, headrace: ChatApp, candidates: "Candidates") -> None:
        super().__init__()
        self.headrace, self.candidates = headrace, candidates
        first, known = candidates.first, headrace.metrics
        self.panes = [CandidatePane(side, first, known, f"side-{side.name}") for side in candidates.answers]
        self.chosen = self.panes[0]
        self._grid = (0, 0)  # columns and rows there are panes in
        self._stopped = float("inf")  # when, first
        self._busy = -1  # how many grew at the latest look
        self._told = "", 0  # what the notice says, cut for which width

    def compose(self) -> ComposeResult:
        yield Static(id="again-head", markup=False)
        with Container(id="again-panes"):
            yield from self.panes
        yield Notice(id="notice", markup=False)
        yield KeyBar()

    def on_mount(self) -> None:
        for pane in self.panes:
            pane.transcript.show_thinking = self.headrace.settings.chat.show_thinking
            pane.transcript.can_focus = False
        self.call_after_refresh(self.sync)

    # -- drawing ---------------------------------------------------------------------------------------------------

    def hear(self, heard: "Sequence[AnswerEvent]") -> None:
        """Take in what the engine said; draws nothing."""
        for side, event in heard:
            for pane in self.panes:
                if pane.side is side:
                    pane.hear(event)

    def extend_last_line(self) -> bool:
        """Show what was added to the answers, where only their last lines are other ones."""
        late = [pane for pane in self.panes if not pane.extend_last_line()]
        return not late

    def sync(self) -> None:
        """Draw what changed."""
        if not self.is_mounted or not self.query("#notice"):
            return
        for pane in self.panes:
            if pane.display:
                pane.sync()
        if self.candidates.growing != self._busy:
            self._busy = self.candidates.growing
            self.refresh_bindings()
        self._show_words()

    def _show_words(self) -> None:
        head, candidates = self.query_one("#again-head", Static), self.candidates
        count, batch = len(self.panes), self.headrace.metrics.batch
        said = [f"{candidates.growing} of {count} growing" if candidates.growing else f"{count} answers"]
        if batch is not None and batch.rate_average is not None:
            said.append(f"{rate_digits(batch.rate_average)} tok/s together")
        if (hidden := sum(not pane.display for pane in self.panes)) > 0:
            said.append(f"{hidden} more: → and ←")
        said.append(" ".join(sanitise(candidates.question.content).split()))
        width = max(4, self.size.width - 2)
        line = Content.assemble(("▚ again", "bold $text-primary"), (" · " + " · ".join(said), "$quiet"))
        line = line.truncate(width, ellipsis=True)
        if str(head.render()) != line.plain:
            head.update(line)
        refused = [f"{pane.side.name}: {pane.side.notice}" for pane in self.panes if pane.side.notice is not None]
        told = " · ".join(filter(None, [candidates.notice, *refused])), width
        if told != self._told:
            self._told = told
            self.query_one(Notice).tell(told[0])

    def on_resize(self, event: events.Resize) -> None:
        """As many columns as are as wide as a pane has to be, and no row more than that takes."""
        count, width, height = len(self.panes), event.size.width, event.size.height - _AROUND
        across = min(count, max(1, width // _WIDTH))
        rows = min(-(-count // across), max(1, height // _HEIGHT))
        self._grid = min(across, -(-count // rows)), rows
        self._arrange()

    def _arrange(self) -> None:
        """Show the page that the chosen one is on."""
        columns, rows = self._grid
        page = max(1, columns * rows)
        start = self.panes.index(self.chosen) // page * page
        shown = self.panes[start : start + page]
        grid = self.query_one("#again-panes")
        grid.styles.grid_size_columns, grid.styles.grid_size_rows = columns, -(-len(shown) // columns)
        for pane in self.panes:
            pane.display = pane in shown
            pane.set_class(pane is self.chosen, "-chosen")
        self.call_after_refresh(self.sync)

    # -- keys ------------------------------------------------------------------------------------------------------

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:  # noqa: ARG002
        if action == "stop":
            return self.candidates.growing > 0
        if action == "leave":
            return not self.candidates.growing
        return True

    def action_stop(self) -> None:
        """Stop all answers; where the engine did not hear of that for a while, go on without it."""
        if time.monotonic() > self._stopped + _HEARD_WITHIN_S:
            self._end(None)
            return
        self._stopped = min(self._stopped, time.monotonic())
        self.candidates.stop()
        self.sync()

    def action_interrupt(self) -> None:
        """Ctrl+C: copy a selection, else stop the answers, else say how to leave."""
        selected = self.get_selected_text()
        if selected:
            self.headrace.copy(selected, "the selection")
            self.clear_selection()
        elif self.candidates.growing:
            self.action_stop()
        else:
            self.headrace.say("Enter takes one, Esc none; Ctrl+Q leaves the program")

    def action_leave(self) -> None:
        """Go on as it was before; the answers stay as branches."""
        self._end(None)

    def action_take(self) -> None:
        """Go on with this one."""
        self._end(self.chosen)

    def _end(self, pane: CandidatePane | None) -> None:
        try:
            self.headrace.end_comparison(pane.side if pane is not None else None)
        except HeadraceError as error:
            self.headrace.refuse(error)

    def action_choose(self, place: int) -> None:
        """This one, if there is one."""
        if place < len(self.panes):
            self.chosen = self.panes[place]
            self._arrange()

    def action_go(self, by: int) -> None:
        self.action_choose((self.panes.index(self.chosen) + by) % len(self.panes))

    def on_click(self, event: events.Click) -> None:
        """The pane that was clicked on."""
        for place, pane in enumerate(self.panes):
            if event.widget is not None and pane in event.widget.ancestors_with_self:
                self.action_choose(place)

    def action_think(self) -> None:
        for pane in self.panes:
            pane.transcript.show_thinking = not pane.transcript.show_thinking

    def action_scroll(self, by: int) -> None:
        self.chosen.transcript.scroll_lines(by)

    @property
    def scrolled(self) -> Sequence[Transcript]:
        return (self.chosen.transcript,)
