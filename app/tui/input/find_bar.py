"""Find bar of Ctrl+F: a line for the words, above the prompt.

The bar posts `Sought`; `ChatScreen` has the transcript find the words, and gives the count back.
"""

from dataclasses import dataclass
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.content import Content
from textual.message import Message as Event
from textual.widgets import Input, Static

from headrace.app.tui.input.fields import Field


class FindBar(Horizontal):
    """Posts the words and the direction; shows the number of matches."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter,up", "seek(-1)", "Before", priority=True),
        Binding("down,shift+enter", "seek(1)", "After", priority=True),
        Binding("escape,ctrl+c", "close", "Done", key_display="Esc", priority=True),
    ]

    @dataclass
    class Sought(Event):
        """by: 0 the newest match, -1 the one before the shown one, 1 the one after."""

        words: str
        by: int

    @dataclass
    class Closed(Event):
        """The bar was closed."""

    def compose(self) -> ComposeResult:
        yield Static("find", id="find-label")
        yield Field(id="find-words", compact=True)
        yield Static("", id="find-count")

    def open(self, words: str = "") -> None:
        """Show the bar with these words and focus it."""
        self.display = True
        field = self.query_one(Field)
        field.value = words
        field.focus()

    def show_count(self, number: int, count: int) -> None:
        """Show the match's number and their count."""
        words = self.query_one(Field).value.strip()
        if count:
            text = f"{number} of {count}"
        elif words:
            text = "not found"
        else:
            text = ""
        self.query_one("#find-count", Static).update(Content.styled(text, "$quiet" if count else "$text-error"))

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        if self.display:
            self.post_message(self.Sought(event.value, 0))

    def action_seek(self, by: int) -> None:
        self.post_message(self.Sought(self.query_one(Field).value, by))

    def action_close(self) -> None:
        self.display = False
        self.post_message(self.Closed())
