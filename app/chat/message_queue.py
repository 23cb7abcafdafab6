"""Queue of messages sent while an answer is written.

Each is sent after a complete answer; an answer that reached a limit of tokens is complete, too. After a stopped or
failed answer the texts return to the input. The full screen polls `send_next` (a conversation) or `send_after` (a
comparison); both return False once the texts have to go back.

Guard: tests/tui/test_queue.py.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from headrace.app.chat.attachments import parse_message
from headrace.app.chat.conversation import Conversation
from headrace.app.sessions.records import Message
from headrace.runtime.errors import HeadraceError

_CONTINUE_AFTER = ("stop", "length")  # `finish_reason` of an answer after which the next message is sent


class Noticing(Protocol):
    """A conversation or a comparison. notice: one line for the user."""

    notice: str | None


class MessageQueue:
    """texts: the queued messages, first to last."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def add(self, text: str) -> None:
        """Queue a text. Raises UsageError for one that cannot be sent, such as with a missing file."""
        parse_message(text)
        self.texts.append(text)

    def take_back(self) -> str:
        """Empty the queue and return its texts as one."""
        texts = self.texts
        self.texts = []
        return "\n\n".join(texts)

    def send_next(self, conversation: Conversation) -> bool:
        """Send the next message once the answer is complete. Return False if it never will be: call `take_back`."""
        if not self.texts or conversation.phase != "idle" or conversation.trimming.question is not None:
            return True
        return self.send_after(conversation.messages[-1:], conversation.send, conversation)

    def send_after(self, answers: Sequence[Message | None], send: Callable[[str], object], notices: Noticing) -> bool:
        """Send the next message if there are answers and all are complete. Return as `send_next`."""
        if not answers or any(answer is None or answer.finish_reason not in _CONTINUE_AFTER for answer in answers):
            return False
        try:
            send(self.texts[0])
        except HeadraceError as error:
            notices.notice = str(error)
            return False
        del self.texts[0]
        return True
