"""A screen with transcripts that scroll while the keys are elsewhere."""

from collections.abc import Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType

from headrace.app.tui.textual_overrides.partial_repaint import FrugalScreen
from headrace.app.tui.transcript.transcript import Transcript


class ScrollingScreen(FrugalScreen):
    """`scrolled` are the transcripts that the keys move."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("pageup", "page(-1)", "Page up", show=False, priority=True),
        Binding("pagedown", "page(1)", "Page down", show=False, priority=True),
        Binding("ctrl+home", "head", "Top", show=False, priority=True),
        Binding("ctrl+end", "tail", "End", show=False, priority=True),
        Binding("ctrl+l", "redraw", "Draw anew", show=False, priority=True),
    ]

    @property
    def scrolled(self) -> Sequence[Transcript]:
        raise NotImplementedError

    def action_page(self, by: int) -> None:
        for transcript in self.scrolled:
            transcript.scroll_pages(by)

    def action_head(self) -> None:
        for transcript in self.scrolled:
            transcript.to_start()

    def action_tail(self) -> None:
        for transcript in self.scrolled:
            transcript.to_end()

    def action_redraw(self) -> None:
        """Ctrl+L: after something else wrote on the terminal."""
        self.app.refresh(repaint=True, layout=True)
