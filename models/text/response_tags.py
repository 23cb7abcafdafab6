"""`<response>` tags around an answer, which Granite 3.2 and 3.3 write after their thinking, as the template asks."""

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
        self._held = ""
        self._is_tagged: bool | None = None  # None: the answer has not begun

    def add(self, token_id: int) -> str:
        """Return the text that this token completed."""
        section, content = self._splitter.feed(self._inner.add(token_id))
        return section + self._answer(content)

    def finish(self, *, cut: bool = False) -> str:
        """End the stream and return the text held back. cut: see `ThinkingStream`."""
        section, content = self._splitter.finish(self._inner.finish(cut=cut))
        content = self._answer(content)
        pending = self._held
        self._held = ""
        return section + content + ("" if self._is_tagged and pending.startswith(_CLOSE) else pending)

    def _answer(self, text: str) -> str:
        self._held += text
        if self._is_tagged is None:
            start = self._held.lstrip()
            if _OPEN.startswith(start):
                return ""
            self._is_tagged = start.startswith(_OPEN)
            if self._is_tagged:
                self._held = start.removeprefix(_OPEN).lstrip("\n")
        released = self._closing_place() if self._is_tagged else len(self._held)
        text = self._held[:released]
        self._held = self._held[released:]
        return text

    def _closing_place(self) -> int:
        """Return the place of a closing tag, or half of one, that nothing but spaces follows."""
        index = self._held.rfind("<")
        rest = self._held[index:] if index >= 0 else ""
        may_close = _CLOSE.startswith(rest) or (rest.startswith(_CLOSE) and not rest[len(_CLOSE) :].strip())
        return index if rest and may_close else len(self._held)
