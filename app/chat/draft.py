"""What is being typed, as it would be sent if it were said next: its files, and how many tokens the engine counted."""

import time
from collections.abc import Sequence

from headrace.app.chat.attachments import read_attachments, take_attachments
from headrace.app.chat.prompt import draft_messages
from headrace.app.engine.messages import DraftCounted, ReadAhead
from headrace.app.sessions.records import Attachment, Message, Session
from headrace.runtime.errors import UsageError

_FRESH_S = 3.0  # files are not looked for and read again with every key; what is sent is read anew


class Draft:
    """files: what goes with it; problem: why one of them cannot, empty where all can. counted: of the last text."""

    def __init__(self) -> None:
        self.files: tuple[Attachment, ...] = ()
        self.problem = ""
        self.counted: DraftCounted | None = None
        self._counted_text = ""
        self._text = ""
        self._asked = 0  # how often
        self._read: dict[str, tuple[float, Sequence[Attachment]]] = {}  # by what names them: when, and what it was

    def ask(
        self, text: str, session: Session, branch: Sequence[Message], *, count_only: bool = False
    ) -> ReadAhead | None:
        """What the engine is asked about this text; None where nothing would be sent, or not all of it can be read."""
        try:
            content, self.files = take_attachments(text, read=self._read_lately)
        except UsageError as error:  # said in full when it is sent
            self.files, self.problem = (), str(error)
            return None
        self.problem = ""
        self._asked, self._text = self._asked + 1, text
        messages = draft_messages(session, branch, content.rstrip(), self.files)
        if not messages:
            return None
        files = tuple(file.text for file in self.files)
        thinking = session.sampling.get("thinking")
        return ReadAhead(messages, thinking, self._asked, count_only=count_only, files=files)

    def _read_lately(self, name: str) -> Sequence[Attachment]:
        now = time.monotonic()
        self._read = {known: kept for known, kept in self._read.items() if now < kept[0] + _FRESH_S}
        if name not in self._read:
            self._read[name] = now, read_attachments(name)
        return self._read[name][1]

    def take(self, counted: DraftCounted) -> None:
        """The engine's answer; one to an earlier text says nothing any more."""
        if counted.id == self._asked:
            self.counted, self._counted_text = counted, self._text

    def count_of(self, text: str) -> DraftCounted | None:
        """Of this very text, if it was counted."""
        return self.counted if self._counted_text == text else None

    @property
    def file_tokens(self) -> Sequence[int | None]:
        """Tokens of each of `files`; None while they are being counted."""
        counted = self.counted.files if self.counted is not None and self.counted.id == self._asked else ()
        return counted if len(counted) == len(self.files) else (None,) * len(self.files)

    def sent(self) -> None:
        """It was said: there is none now."""
        self.files, self.problem, self.counted = (), "", None
        self._read.clear()
