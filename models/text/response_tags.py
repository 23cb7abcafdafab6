"""`<response>` tags around an answer, which Granite 3.2 and 3.3 write after their thinking, as the template asks.

`Tokenizer.answer_stream` puts `ResponseStream` around a detokenizer for templates that ask for them.

Guard: tests/models/text/test_response_tags.py.
"""

from typing import TYPE_CHECKING

from headrace.models.text.thinking import ThinkingSplitter

if TYPE_CHECKING:
    from headrace.models.text.detokenizer import Detokenizer

_OPEN = "<response>"
_CLOSE = "</response>"


def asks_for_tags(template: str) -> bool:
    """Return whether a chat template asks for the tags."""
    return f"{_OPEN}{_CLOSE}" in template


class ResponseStream:
    """Detokenizer that leaves out the tags around an answer; others stay."""

    def __init__(self, inner: "Detokenizer", *, thinks: bool = False) -> None:
        """thinks: the prompt has begun a thinking section."""
        self._inner = inner
        self._splitter = ThinkingSplitter(thinks=thinks)
        self._pending = ""
        self._is_tagged: bool | None = None  # None: the answer has not begun

    def add(self, token_id: int) -> str:
        """Return the text that this token completed."""
        section, content = self._splitter.feed(self._inner.add(token_id))
        return section + self._answer(content)

    def finish(self, *, cut: bool = False) -> str:
        """End the stream and return the text held back. cut: see `ThinkingStream`."""
        section, content = self._splitter.finish(self._inner.finish(cut=cut))
        content = self._answer(content)
        pending = self._pending
        self._pending = ""
        if self._is_tagged and pending.startswith(_CLOSE):
            pending = ""
        return section + content + pending

    def _answer(self, text: str) -> str:
        """Return the certain text of the answer after more of it, and hold back the rest."""
        self._pending += text
        if self._is_tagged is None:
            start = self._pending.lstrip()
            if _OPEN.startswith(start):
                return ""
            self._is_tagged = start.startswith(_OPEN)
            if self._is_tagged:
                self._pending = start.removeprefix(_OPEN).lstrip("\n")
        end = len(self._pending)
        if self._is_tagged:
            end = self._content_length()
        text = self._pending[:end]
        self._pending = self._pending[end:]
        return text

    def _content_length(self) -> int:
        """Return the length of the text before a closing tag, or half of one, that nothing but spaces follows."""
        index = self._pending.rfind("<")
        if index < 0:
            return len(self._pending)
        rest = self._pending[index:]
        if _CLOSE.startswith(rest) or (rest.startswith(_CLOSE) and not rest[len(_CLOSE) :].strip()):
            return index
        return len(self._pending)
