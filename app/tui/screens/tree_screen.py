"""Tree of all branches of a conversation: show or remove a message.

`app/sessions/tree.py` makes the lines. The question before a removal is shared with the chat's `d` and /delete.

Guard: tests/tui/screens/test_tree_screen.py.
"""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from textual.app import App
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widget import Widget
from textual.widgets.option_list import Option

from headrace.app.output.sanitise import safe_line
from headrace.app.sessions.records import Message
from headrace.app.sessions.tree import TreeLine, tree_lines
from headrace.app.tui.screens.chat_state import ChatState
from headrace.app.tui.screens.dialogs import confirm
from headrace.app.tui.screens.list_screen import ListScreen
from headrace.app.tui.textual_overrides.option_list import PagedOptionList

_LONGEST = 400  # characters of a message that are looked at for its line, which is no longer than the screen is wide
_DEEPEST = 24  # cells that forks may take


class TreeScreen(ListScreen[int | None]):
    """Enter shows the branch of the marked message and returns its id; Delete removes it and its followers."""

    HEADING = "branches of this conversation"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "go", "Show", priority=True),
        Binding("ctrl+d,delete", "remove", "Delete", key_display="^D", priority=True),
        Binding("escape", "dismiss(None)", "Close", key_display="Esc", priority=True),
    ]

    def __init__(self, state: ChatState) -> None:
        super().__init__()
        self._state = state
        self._lines: list[TreeLine] = []

    def parts(self) -> Iterator[Widget]:
        yield PagedOptionList(id="tree")

    def on_mount(self) -> None:
        self._fill()
        self.options.focus()

    def _fill(self) -> None:
        talk = self._state.conversation
        self._lines = tree_lines(talk.store.messages(talk.session.id), {message.id for message in talk.messages})
        last_shown = max((index for index, line in enumerate(self._lines) if line.shown), default=None)
        self.set_options([Option(_drawn(line)) for line in self._lines], "no messages", marked=last_shown)

    @property
    def _marked(self) -> Message | None:
        index = self.options.highlighted
        if index is None or index >= len(self._lines):
            return None
        return self._lines[index].message

    def on_option_list_option_selected(self) -> None:
        self.action_go()

    def action_go(self) -> None:
        """Show the branch of the marked message."""
        message = self._marked
        if message is not None and self._state.attempt(lambda: self._state.conversation.show(message.id)):
            self.dismiss(message.id)

    def action_remove(self) -> None:
        """Ask, then remove the marked message and its followers."""
        if (message := self._marked) is not None:
            ask_to_remove(self.app, self._state, message, self._fill)


def ask_to_remove(app: App[Any], state: ChatState, message: Message, then: Callable[[], None]) -> None:
    """Ask, then remove a message and its followers on all branches, and call `then`."""

    def remove() -> None:
        state.attempt(lambda: state.conversation.remove(message.id))
        then()

    removed = "this message"
    if followers := state.store.below(message):
        removed += f" and the {followers:,} after it, on every branch"
    confirm(app, "remove for good?", f"Removes {removed}. This cannot be undone.", "remove", remove)


def _drawn(line: TreeLine) -> Content:
    """Return a line: graph, role, beginning of the text."""
    message = line.message
    lead = line.lead
    if len(lead) > _DEEPEST:
        lead = "…" + lead[1 - _DEEPEST :]
    mark = ("❯ ", "$text-accent") if message.role == "user" else ("◆ ", "$text-primary")
    text = safe_line(message.by_kind.content[:_LONGEST]) or "(no text)"
    return Content.assemble((lead, "$quiet"), mark, (text, "bold" if line.shown else "$quiet"))
