"""Taking something out of a conversation: its text, a code block or a link of a message, the session as a file."""

from collections.abc import Callable, Sequence

from headrace.app.chat.attachments import unquoted
from headrace.app.output.sanitise import sanitise
from headrace.app.sessions.records import Message
from headrace.app.tui.input.browser import open_address
from headrace.app.tui.screens.chat_view import Actions
from headrace.app.tui.transcript.message_parts import code_blocks, web_addresses
from headrace.runtime.errors import HeadraceError, UsageError

_KEYS = "123456789abcdefghijklmnopqrstuvwxyz"
_SHOWN = 60  # characters of a code block's first line


class CopyActions(Actions):
    """What is copied is what is seen: without what could act on a terminal."""

    def do_copy(self, what: str) -> None:
        answer = self._last_answer()
        if what == "code":
            self.copy_code(answer)
        else:
            self._headrace.copy(sanitise(answer.content), "the answer")

    def copy_message(self, message: Message) -> None:
        self._headrace.copy(sanitise(message.content), "the message")

    def copy_code(self, message: Message) -> None:
        """The code block of a message; of several the one that is chosen."""
        blocks = code_blocks(sanitise(message.content))
        if not blocks:
            raise UsageError("there is no code block in this message")
        self._pick(
            "copy which code block?",
            [_first_line(block) for block in blocks],
            lambda number: self._headrace.copy(blocks[number], "the code block"),
        )

    def do_links(self, _: str) -> None:
        self.open_link(self._last_answer())

    def open_link(self, message: Message) -> None:
        """Open a link of a message in the browser, after its whole address was seen and chosen."""
        addresses = web_addresses(sanitise(message.content))
        if not addresses:
            raise UsageError("there is no link in this message")
        self._pick(
            "open which link in the browser?", addresses, lambda number: self._open(addresses[number]), always=True
        )

    def do_export(self, name: str) -> None:
        """To `name`, or to a file named after the session."""
        self._headrace.export_session(self._conversation.session.id, unquoted(name))

    def _last_answer(self) -> Message:
        answer = next((m for m in reversed(self._conversation.messages) if m.role == "assistant"), None)
        if answer is None:
            raise UsageError("there is no answer yet")
        return answer

    def _open(self, address: str) -> None:
        if open_address(address):
            self._headrace.say(f"opened {address}")
        else:
            self._headrace.copy(address, "the address: no browser can be opened from here")

    def _pick(self, title: str, names: Sequence[str], take: Callable[[int], None], *, always: bool = False) -> None:
        """Take one by its number; where there is only one, without asking unless `always`."""
        from headrace.app.tui.screens.dialogs import Choose

        if len(names) == 1 and not always:
            take(0)
            return
        answers = [(str(n), _KEYS[n] if n < len(_KEYS) else " ", name) for n, name in enumerate(names)]

        def resolve(chosen: str | None) -> None:
            if chosen is None:
                return
            try:
                take(int(chosen))
            except HeadraceError as error:
                self._headrace.refuse(error)

        self._screen.app.push_screen(Choose(title, "", answers), resolve)


def _first_line(block: str) -> str:
    """How a code block is told from the others."""
    lines = block.strip().splitlines() or [""]
    first = lines[0] if len(lines[0]) <= _SHOWN else lines[0][: _SHOWN - 1] + "…"
    return first if len(lines) == 1 else f"{first}  ({len(lines)} lines)"
