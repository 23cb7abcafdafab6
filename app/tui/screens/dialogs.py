"""Small dialogs: a line of text, a choice of a few."""

from collections.abc import Sequence
from typing import Any, ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen, Screen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from headrace.app.tui.input.fields import Field

_FOOTER = 1  # line below a dialog's list that shows the keys


def is_open(screen: Screen[Any]) -> bool:
    """Return True while the screen's widgets exist: a refresh or a thread may call back after it was left."""
    return screen.is_mounted and screen.display


def fit_list(screen: Screen[Any]) -> None:
    """Fit a dialog's list to its content and to the window."""
    if not is_open(screen):
        return
    box, options = screen.query_one(".dialog"), screen.query_one(".dialog OptionList", OptionList)
    others = [child for child in box.children if child is not options and child.display]
    taken = sum(child.outer_size.height + child.styles.margin.height for child in others) + box.gutter.height
    limit = screen.size.height if screen.app.has_class("-short") else screen.size.height * 9 // 10
    options.styles.max_height = max(3, limit - taken - _FOOTER)


class Question(ModalScreen[str | None]):
    """A dialog answered once, however fast keys come; None on Esc."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "turn_away", "Cancel", priority=True)]

    _answered = False

    def answer(self, result: str | None) -> None:
        """Close with this result. A second answer would close the screen below."""
        if not self._answered:
            self._answered = True
            self.dismiss(result)

    def action_turn_away(self) -> None:
        self.answer(None)


class AskText(Question):
    """A line of text."""

    def __init__(self, title: str, value: str = "", placeholder: str = "") -> None:
        super().__init__()
        self._title, self._value, self._placeholder = title, value, placeholder

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as box:
            box.border_title = Content(self._title)
            yield Field(self._value, placeholder=self._placeholder)
            yield Static(Content.styled("Enter accepts · Esc cancels", "$quiet"), classes="hint")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.answer(event.value.strip() or None)


class Choose(Question):
    """A choice of a few answers, each with a key."""

    def __init__(self, title: str, text: str, answers: Sequence[tuple[str, str, str]]) -> None:
        """text: "" if the title is enough. answers: (result, key, description)."""
        super().__init__()
        self._title, self._text, self._answers = title, text, list(answers)

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as box:
            box.border_title = Content(self._title)
            if self._text:
                yield Static(Content(self._text), classes="question")
            yield OptionList(
                *(
                    Option(Content.assemble((f" {key} ", "bold $text-accent"), f" {text}"), id=result)
                    for result, key, text in self._answers
                )
            )
            yield Static(Content.styled("↑ ↓ and Enter, or its key · Esc cancels", "$quiet"), classes="hint")

    def on_mount(self) -> None:
        self.query_one(OptionList).focus()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.answer(event.option_id)

    def on_key(self, event: events.Key) -> None:
        """Answer by key."""
        for result, letter, _ in self._answers:
            if event.key == letter:
                event.stop()
                self.answer(result)
                return
