"""Tree of all branches of a conversation: show or remove a message.

`app/sessions/tree.py` makes the lines. The question before a removal is shared with the chat's `d` and /delete.
"""

from collections.abc import Callable
from typing import Any, ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from headrace.app.output.sanitise import sanitise
from headrace.app.sessions.records import Message
from headrace.app.sessions.tree import TreeLine, tree_lines
from headrace.app.tui.screens.chat_state import ChatState
from headrace.app.tui.screens.dialogs import Choose, fit_list
from headrace.app.tui.single_dismissal import SingleDismissal
from headrace.app.tui.textual_overrides.option_list import PagedOptionList
from headrace.app.tui.widgets.key_bar import KeyBar
from headrace.runtime.errors import HeadraceError

_LONGEST = 400  # characters of a message that are looked at for its line, which is no longer than the screen is wide
_DEEPEST = 24  # cells that forks may take


class TreeScreen(SingleDismissal, ModalScreen[int | None]):
    """Enter shows the branch of the marked message and returns its id; Delete removes it and its followers."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "go", "Show", priority=True),
        Binding("ctrl+d,delete", "remove", "Delete", key_display="^D", priority=True),
        Binding("escape", "dismiss(None)", "Close", key_display="Esc", priority=True),
    ]

    def __init__(self, state: ChatState) -> None:
        super().__init__()
        self._state = state
        self._lines: list[TreeLine] = []

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog -large") as box:
            box.border_title = Content("branches of this conversation")
            yield PagedOptionList(id="tree")
        yield KeyBar()

    def on_mount(self) -> None:
        self._fill()
        self._list.focus()

    @property
    def _list(self) -> OptionList:
        return self.query_one("#tree", OptionList)

    def _fill(self) -> None:
        talk = self._state.conversation
        self._lines = tree_lines(talk.store.messages(talk.session.id), {message.id for message in talk.messages})
        options = [Option(_drawn(line)) for line in self._lines]
        self._list.clear_options()
        self._list.add_options(options or [Option(Content.styled("no messages", "$quiet"), disabled=True)])
        self._list.highlighted = max((index for index, line in enumerate(self._lines) if line.shown), default=None)
        self.call_after_refresh(fit_list, self)

    def on_resize(self) -> None:
        self.call_after_refresh(fit_list, self)

    @property
    def _marked(self) -> Message | None:
        index = self._list.highlighted
        if index is None or index >= len(self._lines):
            return None
        return self._lines[index].message

    def on_option_list_option_selected(self) -> None:
        self.action_go()

    def action_go(self) -> None:
        """Show the branch of the marked message."""
        if (message := self._marked) is None:
            return
        try:
            self._state.conversation.show(message.id)
        except HeadraceError as error:
            self._state.show_error(error)
            return
        self.dismiss(message.id)

    def action_remove(self) -> None:
        """Ask, then remove the marked message and its followers."""
        if (message := self._marked) is not None:
            ask_to_remove(self.app, self._state, message, self._fill)


def ask_to_remove(app: App[Any], state: ChatState, message: Message, then: Callable[[], None]) -> None:
    """Ask, then remove a message and its followers on all branches, and call `then`."""

    def answered(answer: str | None) -> None:
        if answer == "yes":
            try:
                state.conversation.remove(message.id)
            except HeadraceError as error:
                state.show_error(error)
            then()

    removed = "this message"
    if followers := state.store.below(message):
        removed += f" and the {followers:,} after it, on every branch"
    question = Choose("remove for good?", f"Removes {removed}. This cannot be undone.", [("yes", "y", "remove")])
    app.push_screen(question, answered)


def _drawn(line: TreeLine) -> Content:
    """Return a line: graph, role, beginning of the text."""
    message = line.message
    lead = line.lead
    if len(lead) > _DEEPEST:
        lead = "…" + lead[1 - _DEEPEST :]
    mark = ("❯ ", "$text-accent") if message.role == "user" else ("◆ ", "$text-primary")
    text = " ".join(sanitise(message.content[:_LONGEST]).split()) or "(no text)"
    return Content.assemble((lead, "$quiet"), mark, (text, "bold" if line.shown else "$quiet"))
