"""Commands that copy an answer, a code block or a selection, or open a link."""

from typing import Any

from textual.screen import Screen

from headrace.app.output.sanitise import sanitise
from headrace.app.sessions.records import Message
from headrace.app.tui.input.browser import open_address
from headrace.app.tui.screens.chat_state import ChatState
from headrace.app.tui.screens.chat_view import ChatView
from headrace.app.tui.transcript.message_parts import code_blocks, web_addresses
from headrace.runtime.errors import UsageError

_SHOWN = 60  # characters of a code block's first line


class CopyActions:
    """Copied text is sanitised, as it is on the screen."""

    def __init__(self, view: ChatView) -> None:
        self._view, self._state = view, view.state
        self.commands = {"copy": self._copy_answer, "links": self._open_answer_link}

    def _copy_answer(self, what: str) -> None:
        if what == "code":
            self.copy_code(self._last_answer())
        else:
            self._state.copy(sanitise(self._last_answer().content), "the answer")

    def copy_message(self, message: Message) -> None:
        self._state.copy(sanitise(message.content), "the message")

    def copy_code(self, message: Message) -> None:
        """Copy a message's code block; ask which if there are several."""
        blocks = code_blocks(sanitise(message.content))
        if not blocks:
            raise UsageError("this message has no code block")
        names = [_first_line(block) for block in blocks]
        self._view.pick("copy which code block?", names, lambda n: self._state.copy(blocks[n], "the code block"))

    def _open_answer_link(self, _: str) -> None:
        self.open_link(self._last_answer())

    def open_link(self, message: Message) -> None:
        """Open a link in the browser, after the user saw and chose its whole address."""
        addresses = web_addresses(sanitise(message.content))
        if not addresses:
            raise UsageError("this message has no link")
        self._view.pick("open which link in the browser?", addresses, lambda n: self._open(addresses[n]), always=True)

    def _last_answer(self) -> Message:
        messages = self._state.conversation.messages
        answer = next((message for message in reversed(messages) if message.role == "assistant"), None)
        if answer is None:
            raise UsageError("there is no answer yet")
        return answer

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
    lines = block.strip().splitlines() or [""]
    first = lines[0] if len(lines[0]) <= _SHOWN else lines[0][: _SHOWN - 1] + "…"
    return first if len(lines) == 1 else f"{first}  ({len(lines)} lines)"
