"""Dialogs that open by themselves: about a full context, and a full disk."""

from collections.abc import Callable
from typing import cast

from textual.screen import Screen

from headrace.app.chat.context_question import CONTEXT_CHOICES, DISK_CHOICES, ContextChoice
from headrace.app.output.sanitise import sanitise
from headrace.app.tui.input.prompt import Prompt
from headrace.app.tui.screens.chat_state import ChatState
from headrace.app.tui.screens.dialogs import UnaskedChoice
from headrace.runtime.errors import HeadraceError


def ask_about_context(screen: Screen[None], state: ChatState, prompt: Prompt, then: Callable[[], None]) -> None:
    """Ask how the open context question is to be resolved, resolve it, and call `then`."""

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
    answers = [answer for answer in CONTEXT_CHOICES if answer[0] in question.choices]
    screen.app.push_screen(UnaskedChoice("the context is full", question.text, answers, prompt), resolve)


def ask_about_disk(screen: Screen[None], state: ChatState, prompt: Prompt) -> None:
    """Offer to go on without saving, after the disk of the sessions was full."""

    def resolve(choice: str | None) -> None:
        try:
            if choice == "unsaved":
                state.store.go_unsaved()
            if choice is not None:
                state.conversation.settle()
                state.keep_draft()
        except HeadraceError as error:
            state.show_error(error)

    text = (
        f"The sessions in {sanitise(str(state.store.db.path))} cannot be written. What you see is kept until you quit."
    )
    screen.app.push_screen(UnaskedChoice("the disk is full", text, DISK_CHOICES, prompt), resolve)
