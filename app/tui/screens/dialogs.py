"""Small dialogs: a line of text, a choice of a few, a choice that opens while the user may be typing.

The chat opens the last kind by itself, for the open questions of a `Conversation`. An answer calls back with the chosen
result, None on Esc. tests/tui/screens/test_dialogs.py and tests/tui/test_unasked.py.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen, Screen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from headrace.app.chat.conversation import OpenQuestion
from headrace.app.output.sanitise import sanitise
from headrace.app.tui.input.fields import Field
from headrace.app.tui.input.prompt import Prompt
from headrace.app.tui.screens.chat_state import ChatState
from headrace.app.tui.textual_overrides.option_list import PagedOptionList
from headrace.app.tui.textual_overrides.single_dismissal import SingleDismissal

_QUIET_S = 1.0  # without a key, until a choice that opened by itself takes any
_BURST_S = 0.3  # between the keys of someone who types
_EARLY_S = 0.001  # by which textual's timers may end too early
_HINT = "↑ ↓ and Enter, or its key · Esc cancels"

Answers = Sequence[tuple[str, str, str]]
"""Answers to choose from: result, key, description."""


def is_open(screen: Screen[Any]) -> bool:
    """Return True while the screen's widgets exist: a refresh or a thread may call back after it was left."""
    return screen.is_mounted and screen.display


class Question(SingleDismissal, ModalScreen[str | None]):
    """A dialog answered once, however fast keys come; None on Esc."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "turn_away", "Cancel", priority=True)]

    def action_turn_away(self) -> None:
        self.dismiss(None)


class AskText(Question):
    """A line of text."""

    def __init__(self, title: str, value: str = "") -> None:
        super().__init__()
        self._title = title
        self._value = value

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as box:
            box.border_title = Content(self._title)
            yield Field(self._value)
            yield Static(Content.styled("Enter accepts · Esc cancels", "$quiet"), classes="hint")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value.strip() or None)


class Choose(Question):
    """A choice of a few answers, each with a key."""

    def __init__(self, title: str, text: str, answers: Answers) -> None:
        """text: "" if the title is enough."""
        super().__init__()
        self._title = title
        self._text = text
        self._answers = list(answers)

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as box:
            box.border_title = Content(self._title)
            if self._text:
                yield Static(Content(self._text), classes="question")
            yield PagedOptionList(
                *(
                    Option(Content.assemble((f" {key} ", "bold $text-accent"), f" {text}"), id=result)
                    for result, key, text in self._answers
                )
            )
            yield Static(Content.styled(_HINT, "$quiet"), classes="hint")

    # Textual calls the handlers of every base class as well, so subclasses override `begin` and `take_key`.
    def on_mount(self) -> None:
        self.begin()

    def on_key(self, event: events.Key) -> None:
        self.take_key(event)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option_id)

    def begin(self) -> None:
        """Take answers from now on."""
        self.query_one(OptionList).focus()

    def take_key(self, event: events.Key) -> None:
        """Answer by key."""
        for result, letter, _ in self._answers:
            if event.key == letter:
                event.stop()
                self.dismiss(result)
                return


def confirm(
    app: App[Any], title: str, text: str, verb: str, then: Callable[[], object], *, otherwise: str = "cancel"
) -> None:
    """Ask for a yes or a no, and call `then` after a yes. verb, otherwise: what each of them does."""

    def answered(answer: str | None) -> None:
        if answer == "yes":
            then()

    app.push_screen(Choose(title, text, [("yes", "y", verb), ("no", "n", otherwise)]), answered)


class UnaskedChoice(Choose):
    """A choice that opens by itself: text typed meanwhile goes to the prompt.

    Keys answer after a second without any. An answer's letter counts if no other key follows at once.
    """

    AUTO_FOCUS = ""  # the list would take Enter

    def __init__(self, title: str, text: str, answers: Answers, prompt: Prompt) -> None:
        """prompt: gets the text that is typed meanwhile."""
        super().__init__(title, text, answers)
        self._prompt = prompt
        self._quiet_until = 0.0  # monotonic clock
        self._letter = ""  # an answer's, until no other key has followed at once

    def begin(self) -> None:
        self._wait_for_quiet()

    def _wait_for_quiet(self) -> None:
        """Take no answers for a second."""
        self._quiet_until = time.monotonic() + _QUIET_S
        self.set_focus(None)
        self._show_hint("what you type goes to the message · Esc cancels")
        self.set_timer(_QUIET_S, self._take_answers)

    def _take_answers(self) -> None:
        """Take answers, unless a key has started the second anew."""
        if is_open(self) and time.monotonic() >= self._quiet_until - _EARLY_S:
            self._show_hint(_HINT)
            self.query_one(OptionList).focus()

    def _show_hint(self, hint: str) -> None:
        self.query_one(".hint", Static).update(Content.styled(hint, "$quiet"))

    def take_key(self, event: events.Key) -> None:
        """Answer by key, or pass text on to the prompt."""
        if not event.is_printable or event.character is None:
            return
        event.stop()
        letters = [letter for _, letter, _ in self._answers]
        is_single = not self._letter and time.monotonic() >= self._quiet_until
        if is_single and event.key in letters:
            self._letter = event.key
            self.set_timer(_BURST_S, self._answer_by_letter)
        else:
            self._prompt.type(self._letter + event.character)
            self._letter = ""
            self._wait_for_quiet()

    def _answer_by_letter(self) -> None:
        for result, letter, _ in self._answers:
            if letter == self._letter:  # none has "", which another key leaves
                self.dismiss(result)
                return

    def on_paste(self, event: events.Paste) -> None:
        event.stop()
        self._prompt.paste(event.text)
        self._wait_for_quiet()


def ask_unasked(
    screen: Screen[Any], state: ChatState, question: OpenQuestion, prompt: Prompt, then: Callable[[], None]
) -> None:
    """Ask a question of the conversation, resolve it, and call `then`; Esc leaves it open.

    prompt: gets what is typed before the choice is made.
    """

    def answered(choice: str | None) -> None:
        if choice is None:
            return
        if state.attempt(lambda: question.resolve(choice)):  # not if the engine died meanwhile
            state.attempt(state.keep_draft)
            if choice == "new":
                state.notify("this is a new session; F4 has the one before")
        then()

    screen.app.push_screen(UnaskedChoice(question.title, sanitise(question.text), question.answers, prompt), answered)
