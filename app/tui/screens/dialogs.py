"""Small dialogs: a line of text, a choice of a few, a choice that opens while the user may be typing.

The chat opens two of the last kind by itself: about a full context, and a full disk. An answer calls back with the
chosen result, None on Esc. tests/tui/screens/test_dialogs.py and tests/tui/test_unasked.py.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen, Screen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from headrace.app.chat.context_trimming import ContextChoice
from headrace.app.chat.conversation import DISK_CHOICES, DiskChoice
from headrace.app.output.sanitise import sanitise
from headrace.app.tui.input.fields import Field
from headrace.app.tui.input.prompt import Prompt
from headrace.app.tui.screens.chat_state import ChatState
from headrace.app.tui.single_dismissal import SingleDismissal
from headrace.app.tui.textual_overrides.option_list import PagedOptionList
from headrace.runtime.errors import HeadraceError

_QUIET_S = 1.0  # without a key, until a choice that opened by itself takes any
_BURST_S = 0.3  # between the keys of someone who types
_EARLY_S = 0.001  # by which textual's timers may end too early
_HINT = "↑ ↓ and Enter, or its key · Esc cancels"
_FOOTER = 1  # line below a dialog's list that shows the keys

Answers = Sequence[tuple[str, str, str]]
"""Answers to choose from: result, key, description."""


def is_open(screen: Screen[Any]) -> bool:
    """Return True while the screen's widgets exist: a refresh or a thread may call back after it was left."""
    return screen.is_mounted and screen.display


def fit_list(screen: Screen[Any]) -> None:
    """Fit a dialog's list to its content and to the window."""
    if not is_open(screen):
        return
    box = screen.query_one(".dialog")
    options = screen.query_one(".dialog OptionList", OptionList)
    others = [child for child in box.children if child is not options and child.display]
    used_lines = sum(child.outer_size.height + child.styles.margin.height for child in others) + box.gutter.height
    max_lines = screen.size.height
    if not screen.app.has_class("-short"):
        max_lines = screen.size.height * 9 // 10
    options.styles.max_height = max(3, max_lines - used_lines - _FOOTER)


class Question(SingleDismissal, ModalScreen[str | None]):
    """A dialog answered once, however fast keys come; None on Esc."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "turn_away", "Cancel", priority=True)]

    def action_turn_away(self) -> None:
        self.dismiss(None)


class AskText(Question):
    """A line of text."""

    def __init__(self, title: str, value: str = "", placeholder: str = "") -> None:
        super().__init__()
        self._title = title
        self._value = value
        self._placeholder = placeholder

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog") as box:
            box.border_title = Content(self._title)
            yield Field(self._value, placeholder=self._placeholder)
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


def ask_about_context(screen: Screen[None], state: ChatState, prompt: Prompt, then: Callable[[], None]) -> None:
    """Ask how the open context question is to be resolved, resolve it, and call `then`.

    prompt: gets what is typed before the choice is made.
    then: called after a choice, not after Esc.
    """

    def resolve(choice: str | None) -> None:
        if choice is None:
            return
        try:
            state.conversation.resolve(cast(ContextChoice, choice))
        except HeadraceError as error:  # the engine may have died meanwhile
            state.show_error(error)
        else:
            if choice == "new":
                state.notify("this is a new session; F4 has the one before")
        then()

    question = state.conversation.trimming.question
    if question is None:
        return
    screen.app.push_screen(UnaskedChoice("the context is full", question.text, question.answers, prompt), resolve)


def ask_about_disk(screen: Screen[None], state: ChatState, prompt: Prompt) -> None:
    """Offer to go on without saving, after the disk of the sessions was full."""

    def resolve(choice: str | None) -> None:
        if choice is None:
            return
        try:
            state.conversation.resolve_full_disk(cast(DiskChoice, choice))
            state.keep_draft()
        except HeadraceError as error:
            state.show_error(error)

    text = (
        f"The sessions in {sanitise(str(state.store.db.path))} cannot be written. What you see is kept until you quit."
    )
    screen.app.push_screen(UnaskedChoice("the disk is full", text, DISK_CHOICES, prompt), resolve)
