"""The dialog for a full context: which messages are left out."""

from collections.abc import Callable
from typing import cast

from textual.screen import Screen

from headrace.app.chat.context_question import ContextChoice
from headrace.app.tui.screens.chat_state import ChatState
from headrace.app.tui.screens.dialogs import Choose
from headrace.runtime.errors import HeadraceError

_ANSWERS = (
    ("drop", "d", "leave out the oldest turns"),
    ("summarise", "s", "summarise the oldest turns, then leave them out"),
    ("new", "n", "continue in a new session"),
)


def ask_about_context(screen: Screen[None], state: ChatState, then: Callable[[], None]) -> None:
    """Ask how the open context question is to be resolved, resolve it, and call `then`."""

    def resolve(choice: str | None) -> None:
        if choice is None:
            return
        try:
            state.conversation.resolve(cast(ContextChoice, choice))
        except HeadraceError as error:  # the engine may have died meanwhile
            state.show_error(error)
        then()

    question = state.conversation.trimming.question
    if question is None:
        return
    text = (
        f"{'With this answer' if question.during_answer else 'With your message'} the conversation has "
        f"{question.tokens:,} tokens; the context holds {question.limit:,}, answer included. "
        "Nothing is removed without your choice."
    )
    screen.app.push_screen(Choose("the context is full", text, _ANSWERS), resolve)
