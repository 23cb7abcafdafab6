"""Commands that send, edit, regenerate, remove, trim and copy messages.

The operations are `Conversation`'s; here they get the prompt, questions and the screen. They raise HeadraceError, which
the chat's screen shows.

Guards: tests/tui/test_chat.py, test_parts.py and test_copy_actions.py.
"""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from textual.app import SuspendNotSupported
from textual.screen import Screen

from headrace.app.chat.commands import (
    attach,
    last_message,
    message_text,
    message_to_edit,
    summary_to_edit,
    undo_trimming,
)
from headrace.app.output.markdown_parser import is_web_address, parser
from headrace.app.output.sanitise import sanitise
from headrace.app.sessions.records import Message
from headrace.app.tui.input.platform_tools import open_address
from headrace.app.tui.screens.chat_state import ChatState
from headrace.app.tui.screens.chat_view import ChatView
from headrace.app.tui.transcript.context_mark import MARK, mark_message
from headrace.runtime.errors import UsageError

if TYPE_CHECKING:
    from markdown_it.token import Token

_SHOWN = 60  # characters of a code block's first line
_ADDRESS = re.compile(r"https?://[^\s<>\"'`|\\^{}]+")  # in plain text, such as (see https://example.org/a?b=1).
_TRAILING = ".,;:!?)]*_"  # characters after an address that rarely belong to it


class MessageActions:
    """Act on the branch that the chat shows. Copied text is sanitised, as it is on the screen, and without thinking.

    commands: functions by the names in `app.chat.commands.COMMANDS`; each takes the text after the name. The public
    methods with a message are for keys on a selected message, see `ChatActions.act`.
    """

    def __init__(self, view: ChatView) -> None:
        self._view = view
        self._state = view.state
        self.commands = {
            "file": self._attach_file,
            "editor": self._open_editor,
            "queue": self._return_queue,
            "regen": lambda _: self.regenerate(None),
            "continue": self.continue_answer,
            "edit": self._edit_last,
            "summary": self.edit_summary,
            "tree": self._show_tree,
            "delete": self._remove_last,
            "copy": self._copy_answer,
            "links": self._open_answer_link,
        }

    def send(self, text: str) -> None:
        """Send a message, or queue it after the answer in progress; during an edit, finish that."""
        view = self._view
        conversation = self._state.conversation
        if view.editing is not None:
            if view.editing == MARK:
                conversation.set_summary(text)
            else:
                conversation.edit(view.editing, text)
            view.end_edit()
        elif conversation.phase != "idle" or view.queue.texts:
            view.queue.add(message_text(text))
        else:
            conversation.send(message_text(text))
        view.show_latest_answer()

    # -- the prompt ------------------------------------------------------------------------------------------------

    def _attach_file(self, path: str) -> None:
        """Check that a file can be attached, and leave the command in the prompt above the message."""
        line, what = attach(path)
        self._view.prompt.put(line)
        self._state.notify(f"{what} attached to this message; Enter sends both")

    def _open_editor(self, _: str) -> None:
        """Edit the prompt's text in the user's own editor."""
        from headrace.app.tui.input.editor import edit_text

        prompt = self._view.prompt
        failed = None
        text = prompt.whole_text
        edited = text
        try:
            with self._view.screen.app.suspend():  # an exception in this block would leave the terminal suspended
                try:
                    edited = edit_text(text)
                except UsageError as error:
                    failed = error
        except SuspendNotSupported:
            raise UsageError("no editor can be opened here") from None
        if failed is not None:
            raise failed
        if edited != text:
            prompt.put_edited(edited)

    def _return_queue(self, _: str) -> None:
        if not self._view.queue.texts:
            raise UsageError("no message is queued")
        self._view.return_queue()

    # -- answers ---------------------------------------------------------------------------------------------------

    def regenerate(self, message: Message | None) -> None:
        """Answer the question of a message again; None: of the last one."""
        self._state.conversation.regenerate(None if message is None else message.id)
        self._view.show_latest_answer()

    def continue_answer(self, _: str) -> None:
        self._state.conversation.continue_answer()
        self._view.show_latest_answer()

    # -- editing ---------------------------------------------------------------------------------------------------

    def _edit_last(self, which: str) -> None:
        """Put the last user message, or with `answer` the last answer, into the prompt."""
        self.edit(message_to_edit(self._state.conversation, which))

    def edit(self, message: Message) -> None:
        self._require_idle()
        self._view.begin_edit(message)

    def edit_summary(self, what: str) -> None:
        """Edit the summary sent in place of older messages; `undo`: undo the latest change of the messages left out."""
        conversation = self._state.conversation
        if what == "undo":
            undone = undo_trimming(conversation)
            self._view.sync()
            self._state.notify(undone)
            return
        # The stand-in has the id MARK, by which `send` knows that the text is a summary.
        self.edit(mark_message(conversation.session.id, summary_to_edit(conversation)))

    # -- branches --------------------------------------------------------------------------------------------------

    def switch_branch(self, message: Message, step: int) -> None:
        self._state.conversation.switch_branch(message.id, step)

    def _show_tree(self, _: str) -> None:
        from headrace.app.tui.screens.tree_screen import TreeScreen

        def go_to(message_id: int | None) -> None:
            if message_id is not None:
                self._view.sync()
                self._view.transcript.go_to(message_id, "")

        self._view.screen.app.push_screen(TreeScreen(self._state), go_to)

    def _remove_last(self, _: str) -> None:
        self.remove(last_message(self._state.conversation))

    def remove(self, message: Message) -> None:
        """Ask, then remove a message and all that follow it."""
        from headrace.app.tui.screens.tree_screen import ask_to_remove

        self._require_idle()
        ask_to_remove(self._view.screen.app, self._state, message, self._view.sync)

    def _require_idle(self) -> None:
        if self._state.conversation.phase != "idle":
            raise UsageError("an answer is in progress; Esc stops it")

    # -- copies and links ----------------------------------------------------------------------------------------------

    def _copy_answer(self, what: str) -> None:
        if what == "code":
            self.copy_code(self._last_answer())
        else:
            self._state.copy(sanitise(self._last_answer().by_kind.content), "the answer")

    def copy_message(self, message: Message) -> None:
        self._state.copy(sanitise(message.by_kind.content), "the message")

    def copy_code(self, message: Message) -> None:
        """Copy a message's code block; ask which if there are several."""
        blocks = code_blocks(sanitise(message.by_kind.content))
        if not blocks:
            raise UsageError("this message has no code block")
        names = [_first_line(block) for block in blocks]
        self._view.pick("copy which code block?", names, lambda n: self._state.copy(blocks[n], "the code block"))

    def _open_answer_link(self, _: str) -> None:
        self.open_link(self._last_answer())

    def open_link(self, message: Message) -> None:
        """Open a link in the browser, after the user saw and chose its whole address."""
        addresses = web_addresses(sanitise(message.by_kind.content))
        if not addresses:
            raise UsageError("this message has no link")
        self._view.pick("open which link in the browser?", addresses, lambda n: self._open(addresses[n]), always=True)

    def _last_answer(self) -> Message:
        return self._state.conversation.branch.last("assistant")

    def _open(self, address: str) -> None:
        if open_address(address):
            self._state.notify(f"opened {address}")
        else:
            self._state.copy(address, "the address: no browser can be opened from here")


def copy_selection(screen: Screen[Any], state: ChatState) -> bool:
    """Copy the text selected with the mouse; return whether there was any."""
    if not (selected := screen.get_selected_text()):
        return False
    state.copy(selected, "the selection")
    screen.clear_selection()
    return True


def _first_line(block: str) -> str:
    """Return a code block's first line, shortened, and its number of lines if there are several."""
    first, *others = block.strip().splitlines() or [""]
    if len(first) > _SHOWN:
        first = first[: _SHOWN - 1] + "…"
    if others:
        return f"{first}  ({1 + len(others)} lines)"
    return first


def code_blocks(text: str) -> list[str]:
    """Return the fenced and indented code of a Markdown text, in order."""
    return [token.content for token in parser().parse(text) if token.type in ("fence", "code_block")]


def web_addresses(text: str) -> list[str]:
    """Return the web addresses of a Markdown text, links and plain ones, each once, in order; none in code."""
    tokens = (child for token in parser().parse(text) for child in token.children or [])
    addresses = (address for token in tokens for address in _addresses_in(token))
    return list(dict.fromkeys(address for address in addresses if is_web_address(address)))


def _addresses_in(child: "Token") -> Iterator[str]:
    """Yield the addresses of an inline token: of a link or an image, or written as text."""
    if child.type == "link_open":
        yield str(child.attrs["href"])
    elif child.type == "image":
        yield str(child.attrs["src"])
    elif child.type == "text":
        for match in _ADDRESS.finditer(child.content):
            yield match[0].rstrip(_TRAILING)
