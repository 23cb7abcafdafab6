"""The message being typed: its attachments, and its prompt for counting and prefetching.

The screen calls `Conversation.prefetch` while the user types, to count tokens, and in pauses, to prefill them as well
(`app.tui.screens.prompt_prefetch`). The engine answers with a `PromptCounted`. Its id is the number of the request:
counts of earlier texts are ignored.

Guard: tests/app/chat/test_unsent_message.py.
"""

import time
from collections.abc import Sequence

from headrace.app.chat.answer_setup import stored_options
from headrace.app.chat.attachments import read_attachments, take_attachments
from headrace.app.chat.prompt import prompt_messages
from headrace.app.engine.commands import PrefetchPrompt
from headrace.app.engine.events import PromptCounted
from headrace.app.sessions.records import Attachment, Message, Session
from headrace.runtime.errors import UsageError

_FRESH_S = 3.0  # files are read again after so long; sending always reads them anew


class UnsentMessage:
    """The text in the input, as far as it is known to the engine.

    files: its attachments.
    problem: why one of them cannot be read, or "".
    counted: the latest token count; None before the first.
    """

    def __init__(self) -> None:
        self.files: tuple[Attachment, ...] = ()
        self.problem = ""
        self.counted: PromptCounted | None = None
        self._counted_text = ""
        self._text = ""
        self._requests = 0  # number, and id, of the newest request
        self._tokens: dict[str, int] = {}  # of the files counted last, by their text
        self._read: dict[str, tuple[float, Sequence[Attachment]]] = {}  # by name: time and content

    def update(
        self, text: str, session: Session, branch: Sequence[Message], *, count_only: bool = False
    ) -> PrefetchPrompt | None:
        """Take the newest text, and read its files; return the request to count and prefill it.

        None if nothing would be sent, or a file or a setting cannot be read.
        """
        try:
            content, self.files = take_attachments(text, read=self._read_lately)
        except UsageError as error:  # reported in full when it is sent
            self.files = ()
            self.problem = str(error)
            return None
        self.problem = ""
        self._requests += 1
        self._text = text
        messages = prompt_messages(session, branch, content.rstrip(), self.files)
        if not messages:
            return None
        try:
            options = stored_options(session.sampling)
        except UsageError:  # reported when it is sent
            return None
        return PrefetchPrompt(
            messages,
            options.thinking,
            self._requests,
            count_only=count_only,
            files=tuple(file.text for file in self.files),
            variables=options.chat_template_kwargs,
        )

    def _read_lately(self, name: str) -> Sequence[Attachment]:
        now = time.monotonic()
        for known, (read_at, _) in list(self._read.items()):
            if now >= read_at + _FRESH_S:
                del self._read[known]
        if name not in self._read:
            self._read[name] = now, read_attachments(name)
        _, files = self._read[name]
        return files

    def take_count(self, counted: PromptCounted) -> bool:
        """Take a count; counts of earlier texts are ignored. Return True for a count of the conversation alone."""
        if counted.id != self._requests:
            return False
        self.counted = counted
        self._counted_text = self._text
        if len(counted.files) == len(self.files):
            self._tokens = {file.text: count for file, count in zip(self.files, counted.files, strict=True)}
        return not self._text and not self.files

    def count_of(self, text: str) -> PromptCounted | None:
        """Return the count of this very text, if there is one."""
        return self.counted if self._counted_text == text else None

    @property
    def file_tokens(self) -> Sequence[int | None]:
        """Tokens of each of `files`; None until they are counted."""
        return [self._tokens.get(file.text) for file in self.files]

    def sent(self) -> None:
        """Clear the attachments, their problem and the count: the message was sent.

        Token counts of files stay, for the case that the next message has the same files.
        """
        self.files = ()
        self.problem = ""
        self.counted = None
        self._requests += 1  # a count of the sent text that arrives later is ignored
        self._read.clear()
