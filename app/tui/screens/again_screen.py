"""The screen of /again: several answers to the last question, generated in one batch, one of which is taken.

The panes stand in a grid. Where not all fit, the page with the chosen one shows.

`ChatActions` opens it over `Candidates` (`app/chat/candidates.py`), which has the answers and takes one; the poller
calls `handle_events` and `sync`. tests/tui/screens/test_again_screen.py guards this.
"""

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container
from textual.widgets import Static

from headrace.app.chat.parallel_answers import ParallelAnswer
from headrace.app.output.sanitise import safe_line
from headrace.app.tui.screens.chat_state import ChatState
from headrace.app.tui.screens.message_actions import copy_selection
from headrace.app.tui.screens.notices import Notice
from headrace.app.tui.screens.parallel_screen import AnswerPane, ParallelScreen
from headrace.app.tui.transcript.transcript import SCROLL_KEYS
from headrace.app.tui.widgets.key_bar import KeyBar
from headrace.runtime.metrics.units import three_digits

if TYPE_CHECKING:
    from headrace.app.chat.candidates import Candidates

_MIN_COLUMNS = 38  # of the screen, for a pane
_MIN_LINES = 9  # of the screen, for a pane
_OTHER_LINES = 3  # of the screen, without panes
_STOP_WITHIN_S = 2.0  # a prefill pass is not cut short


class AgainScreen(ParallelScreen):
    """Esc stops all answers, then leaves without taking one."""

    AUTO_FOCUS = ""
    BINDINGS: ClassVar[list[BindingType]] = [
        *SCROLL_KEYS,
        # `check_action` enables one of both.
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

    def __init__(self, state: ChatState, candidates: "Candidates") -> None:
        panes = [AnswerPane(side, candidates.first, state.metrics, _title) for side in candidates.answers]
        super().__init__(state, candidates, panes)
        self.candidates = candidates
        self.chosen = self.panes[0]
        self._grid = (0, 0)  # panes next to each other, and above each other
        self._stopped_at: float | None = None  # monotonic clock at the first stop

    def compose(self) -> ComposeResult:
        yield Static(id="parallel-head", markup=False)
        with Container(id="again-panes"):
            yield from self.panes
        yield Notice(id="notice", markup=False)
        yield KeyBar()

    def on_mount(self) -> None:
        # Textual calls the `on_mount` of the base class, too.
        for pane in self.panes:
            pane.transcript.can_focus = False

    @property
    def keys_state(self) -> object:
        return self.candidates.growing

    @property
    def scrolled(self) -> Sequence[AnswerPane]:
        return [self.chosen]

    # -- drawing ---------------------------------------------------------------------------------------------------

    @property
    def head(self) -> str:
        candidates = self.candidates
        count = len(self.panes)
        answers = self.state.metrics.answers
        parts = ["▚ again"]
        if candidates.growing:
            parts.append(f"{candidates.growing} of {count} running")
        else:
            parts.append(f"{count} answers")
        if answers.is_several and answers.rate_average is not None:
            parts.append(f"{three_digits(answers.rate_average)} tok/s total")
        num_hidden = sum(not pane.display for pane in self.panes)
        if num_hidden:
            parts.append(f"{num_hidden} more: → and ←")
        parts.append(safe_line(candidates.question.content))
        return " · ".join(parts)

    def sync_panes(self) -> None:
        for pane in self.panes:
            if pane.display:
                pane.sync()

    def on_resize(self, event: events.Resize) -> None:
        """Choose as many columns as fit, and no more rows than they need."""
        count = len(self.panes)
        max_columns = min(count, max(1, event.size.width // _MIN_COLUMNS))
        max_rows = max(1, (event.size.height - _OTHER_LINES) // _MIN_LINES)
        rows = min(max_rows, math.ceil(count / max_columns))
        columns = min(max_columns, math.ceil(count / rows))
        self._grid = (columns, rows)
        self._arrange()

    def _arrange(self) -> None:
        """Show the page with the chosen pane."""
        columns, rows = self._grid
        page_size = max(1, columns * rows)
        page = self.panes.index(self.chosen) // page_size
        shown = self.panes[page * page_size : (page + 1) * page_size]
        grid = self.query_one("#again-panes")
        grid.styles.grid_size_columns = columns
        grid.styles.grid_size_rows = math.ceil(len(shown) / columns)
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
        """Stop all answers; leave without waiting if the engine has not reacted to an earlier stop."""
        now = time.monotonic()
        if self._stopped_at is None:
            self._stopped_at = now
        elif now > self._stopped_at + _STOP_WITHIN_S:
            self.leave(None)
            return
        self.candidates.stop()
        self.sync()

    def action_interrupt(self) -> None:
        """Handle Ctrl+C: copy a selection, else stop the answers."""
        if copy_selection(self, self.state):
            return
        if self.candidates.growing:
            self.action_stop()
        else:
            self.state.notify("Enter takes one, Esc none; Ctrl+Q quits")

    def action_leave(self) -> None:
        self.leave(None)

    def action_take(self) -> None:
        self.leave(self.chosen.side)

    def action_choose(self, index: int) -> None:
        if index < len(self.panes):
            self.chosen = self.panes[index]
            self._arrange()

    def action_go(self, by: int) -> None:
        self.action_choose((self.panes.index(self.chosen) + by) % len(self.panes))

    def on_click(self, event: events.Click) -> None:
        for index, pane in enumerate(self.panes):
            if event.widget is not None and pane in event.widget.ancestors_with_self:
                self.action_choose(index)

    def action_scroll(self, by: int) -> None:
        self.chosen.transcript.scroll_lines(by)


def _title(side: ParallelAnswer) -> str:
    """Return the number and the seed. Model and question are the same for all."""
    seed = side.setup.sampling.get("seed")
    if seed is None:
        return side.name
    return f"{side.name} · seed {seed}"
