"""The two search bars above the prompt: Ctrl+F finds words in the conversation, Ctrl+R an entry of the history.

`ChatScreen` opens them and handles their messages. For a `FindBar.SearchRequested` it searches the transcript, and
calls `show_count`; the history bar searches the entries that it was opened with.

Guards: tests/tui/input/test_history_bar.py and tests/tui/test_chat.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.message import Message as Event
from textual.widgets import Input, Static

from headrace.app.tui.input.fields import Field

SearchDirection = Literal[-1, 0, 1]
"""-1: the match before the shown one. 0: the newest match. 1: the match after the shown one."""


class SearchBar(Vertical):
    """A line with a label, the words and a count. `search` is called with every change of the words, and by `show`."""

    LABEL = ""

    @dataclass
    class Closed(Event):
        """The bar was closed, and nothing was taken."""

        bar: "SearchBar"

    def compose(self) -> ComposeResult:
        with Horizontal():
            yield Static(self.LABEL, classes="label")
            yield Field(compact=True)
            yield Static("", classes="count")

    @property
    def field(self) -> Field:
        return self.query_one(Field)

    def show(self, words: str) -> None:
        """Show the bar with these words, search for them, and focus it."""
        self.display = True
        self.field.value = words
        self.field.focus()
        self.search(words)  # no change is reported if the field has these words from the time before

    def search(self, words: str) -> None:
        raise NotImplementedError

    def show_count(self, number: int, count: int) -> None:
        """Show the match's number and their count; 0 and 0 without one."""
        text = ""
        if count:
            text = f"{number} of {count}"
        elif self.field.value.strip():
            text = "not found"
        self.query_one(".count", Static).update(Content.styled(text, "$quiet" if count else "$text-error"))

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        if self.display:
            self.search(event.value)

    def action_close(self) -> None:
        self.display = False
        self.post_message(self.Closed(self))


class FindBar(SearchBar):
    """Requests a search with every change of the words, and with the keys for the match before and after."""

    LABEL = "find"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter,up", "seek(-1)", "Before", priority=True),
        Binding("down,shift+enter", "seek(1)", "After", priority=True),
        Binding("escape,ctrl+c", "close", "Done", key_display="Esc", priority=True),
    ]

    @dataclass
    class SearchRequested(Event):
        """A match of the words is to be shown; none for empty words."""

        words: str
        direction: SearchDirection

    def search(self, words: str) -> None:
        self.post_message(self.SearchRequested(words, 0))

    def action_seek(self, direction: SearchDirection) -> None:
        self.post_message(self.SearchRequested(self.field.value, direction))


class HistoryBar(SearchBar):
    """Shows the entry that matches below the words, the newest first, case aside. Enter takes it, Esc none."""

    LABEL = "history"
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

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self._entries: Sequence[str] = ()
        self._matches: list[str] = []
        self._index = 0  # of the shown match

    def compose(self) -> ComposeResult:
        yield from super().compose()
        yield Static("", classes="entry", markup=False)

    def open(self, entries: Sequence[str]) -> None:
        """Show the bar and focus it. entries: newest first."""
        self._entries = entries
        self.show("")

    def search(self, words: str) -> None:
        wanted = " ".join(words.lower().split())
        self._matches = [entry for entry in self._entries if wanted in _one_line(entry).lower()]
        self._index = 0
        self._show_match()

    def _show_match(self) -> None:
        """Show the match and its number."""
        self.show_count(self._index + 1, len(self._matches))
        entry = _one_line(self._matches[self._index]) if self._matches else ""
        line = self.query_one(".entry", Static)
        line.update(Content(entry).truncate(max(1, self.content_size.width), ellipsis=True))

    def on_resize(self) -> None:
        self._show_match()

    def action_seek(self, by: int) -> None:
        """Show an older match, or a newer one; the ends stay."""
        self._index = max(0, min(self._index + by, len(self._matches) - 1))
        self._show_match()

    def action_take(self) -> None:
        if self._matches:
            self.display = False
            self.post_message(self.Taken(self._matches[self._index]))


def _one_line(entry: str) -> str:
    return " ".join(entry.split())
