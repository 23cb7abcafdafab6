"""Messages that were sent while an answer was written: each is asked when the answer before it has ended by itself.

An answer that was stopped, or failed, may make the next question pointless: then nothing is asked, and the texts go
back to whoever typed them.
"""

from headrace.app.chat.attachments import parse_message
from headrace.app.chat.conversation import Conversation
from headrace.runtime.errors import HeadraceError

_GO_ON_AFTER = ("stop", "length")


class MessageQueue:
    """texts: what waits, first to last."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def add(self, text: str) -> None:
        """Raises UsageError for what could not be sent either, such as a file that is missing."""
        parse_message(text)
        self.texts.append(text)

    def take_back(self) -> str:
        """Everything that waits, as one text; nothing waits any more."""
        texts, self.texts = self.texts, []
        return "\n\n".join(texts)

    def send_next(self, conversation: Conversation) -> bool:
        """Ask the next one if it is its turn. False where it will not be: `take_back` says what was not asked."""
        if not self.texts or conversation.phase != "idle" or conversation.trimming.question is not None:
            return True
        last = conversation.messages[-1] if conversation.messages else None
        if last is None or last.finish_reason not in _GO_ON_AFTER:
            return False
        try:
            conversation.send(self.texts[0])
        except HeadraceError as error:
            conversation.notice = str(error)
            return False
        del self.texts[0]
        return True
