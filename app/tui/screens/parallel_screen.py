"""Parallel answers: panes with metrics and text, shared by the screens of /compare and /again."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from textual.content import Content
from textual.screen import Screen
from textual.widgets import Static

from headrace.app.answer.repetition import REPEATS
from headrace.app.sessions.records import Draft
from headrace.app.tui.screens.answer_pane import AnswerPane
from headrace.app.tui.screens.chat_keys import scroll
from headrace.app.tui.screens.chat_state import ChatState
from headrace.app.tui.screens.notices import Notice
from headrace.app.tui.single_dismissal import SingleDismissal
from headrace.app.tui.textual_overrides.partial_repaint import use_partial_repaint
from headrace.runtime.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.app.chat.parallel_answer import ParallelAnswer
    from headrace.app.chat.parallel_answers import AnswerEvent, ParallelAnswers


class ParallelScreen(SingleDismissal, Screen[Draft]):
    """A head, one pane per answer, and a notice; the app polls the answers.

    Subclasses arrange the panes and define `head`, `busy`, `scrolled` and `sync_panes`.
    """

    def __init__(self, state: ChatState, answers: "ParallelAnswers", panes: Sequence[AnswerPane]) -> None:
        super().__init__()
        use_partial_repaint(self)
        self.state = state
        self.answers = answers
        self.panes = list(panes)
        self._busy: object = None
        self._shown_notice = "", 0  # the notice, and the width it was wrapped for

    def on_mount(self) -> None:
        for pane in self.panes:
            pane.transcript.show_thinking = self.state.settings.chat.show_thinking
        self.call_after_refresh(self.sync)

    @property
    def head(self) -> str:
        raise NotImplementedError

    @property
    def busy(self) -> object:
        """State that the available keys depend on."""
        raise NotImplementedError

    @property
    def scrolled(self) -> Sequence[AnswerPane]:
        return self.panes

    # -- drawing ---------------------------------------------------------------------------------------------------

    def handle_events(self, events: "Sequence[AnswerEvent]") -> None:
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
        if not self.is_mounted or not self.query(Notice):
            return
        self.sync_panes()
        if self.busy != self._busy:
            self._busy = self.busy
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
        notice = " · ".join(filter(None, [self.answers.notice, *refused])), width
        if notice != self._shown_notice:
            self._shown_notice = notice
            self.query_one(Notice).show(notice[0])

    def sync_panes(self) -> None:
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
        scroll([pane.transcript for pane in self.scrolled], where)

    def leave(self, side: "ParallelAnswer | None") -> None:
        """Return to the chat with this answer; None: as before."""
        try:
            self.state.end_comparison(side)
        except HeadraceError as error:
            self.state.show_error(error)
        else:
            self.dismiss(self.typed)
