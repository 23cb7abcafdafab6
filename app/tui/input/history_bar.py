"""History search of Ctrl+R: a line for the words and the entry that matches, above the prompt.

`ChatScreen` opens it with the prompt's history, and puts a taken entry into the prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.message import Message as Event
from textual.widgets import Input, Static

from headrace.app.tui.input.fields import Field


class HistoryBar(Vertical):
    """Searches entries from the newest to the oldest, case aside. Enter takes the shown one, Esc none."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter,tab", "take", "Take", key_display="Enter", priority=True),
        Binding("ctrl+r,up", "seek(1)", "Older", key_display="^R", priority=True),
        Binding("down", "seek(-1)", "Newer", key_display="↓", priority=True),
        Binding("escape,ctrl+c,ctrl+g", "close", "Leave", key_display="Esc", priority=True),
    ]

    @dataclass
    class Taken(Event):
        """An entry was taken, and the bar was closed."""

        entry: str

    @dataclass
    class Closed(Event):
        """The bar was closed without an entry."""

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self._entries: Sequence[str] = ()
        self._matches: list[str] = []
        self._index = 0  # of the shown match

    def compose(self) -> ComposeResult:
        with Horizontal():
            yield Static("history", id="history-label")
            yield Field(id="history-words", compact=True)
            yield Static("", id="history-count")
        yield Static("", id="history-entry", markup=False)

    def open(self, entries: Sequence[str]) -> None:
        """Show the bar and focus it. entries: newest first."""
        self.display = True
        self._entries = entries
        field = self.query_one(Field)
        field.value = ""
        field.focus()
        self._search("")

    def _search(self, words: str) -> None:
        wanted = " ".join(words.lower().split())
        self._matches = [entry for entry in self._entries if wanted in _one_line(entry).lower()]
        self._index = 0
        self._show()

    def _show(self) -> None:
        """Show the match and its number."""
        number = Content.styled("not found", "$text-error")
        entry = ""
        if self._matches:
            number = Content.styled(f"{self._index + 1} of {len(self._matches)}", "$quiet")
            entry = _one_line(self._matches[self._index])
        self.query_one("#history-count", Static).update(number)
        line = self.query_one("#history-entry", Static)
        line.update(Content(entry).truncate(max(1, self.content_size.width), ellipsis=True))

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        if self.display:
            self._search(event.value)

    def on_resize(self) -> None:
        self._show()

    def action_seek(self, by: int) -> None:
        """Show an older match, or a newer one; the ends stay."""
        self._index = max(0, min(self._index + by, len(self._matches) - 1))
        self._show()

    def action_take(self) -> None:
        if self._matches:
            self.display = False
            self.post_message(self.Taken(self._matches[self._index]))

    def action_close(self) -> None:
        self.display = False
        self.post_message(self.Closed())


def _one_line(entry: str) -> str:
    return " ".join(entry.split())
