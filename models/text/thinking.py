"""Separation of a reasoning model's thinking from its answer.

The section is `<think> ... </think>` at the beginning of the text; later tags are plain text. Stateless: it takes the
whole text so far.
"""

from dataclasses import dataclass

from headrace.models.text.half_mark import half_length

OPEN = "<think>"
CLOSE = "</think>"
LEVELS = ("low", "medium", "high")
Thinking = bool | int | str
"""Thinking on or off, its budget in tokens, or one of LEVELS."""


@dataclass(frozen=True, slots=True)
class Parts:
    """thinking: None without a section. is_open: the section has not ended yet."""

    thinking: str | None
    answer: str
    is_open: bool = False


def split_thinking(text: str, *, growing: bool = False) -> Parts:
    """Split `text`. While it is `growing`, half a tag at its end is left out of both parts."""
    start = text.lstrip()
    if not start.startswith(OPEN):
        if growing and OPEN.startswith(start):
            return Parts(None, "")
        return Parts(None, text)
    body = start[len(OPEN) :]
    thinking, tag, answer = body.partition(CLOSE)
    if tag:
        return Parts(thinking.strip("\n"), answer.lstrip("\n"))
    if growing:
        thinking = thinking[: len(thinking) - half_length(thinking, CLOSE)]
    return Parts(thinking.strip("\n"), "", is_open=True)


class ThinkingGate:
    """Separation of a growing text's thinking from all behind it, where something counts in the answer alone."""

    def __init__(self, *, thinks: bool) -> None:
        """thinks: the section has begun before the text."""
        self._held = ""
        self._thinks = thinks
        self._is_over = False

    def feed(self, text: str) -> tuple[str, str]:
        """Return the next part of the section, and the text behind it. Half a tag is held back."""
        if self._is_over:
            return "", text
        self._held += text
        start = self._held.lstrip()
        if not self._thinks and not start.startswith(OPEN):
            if OPEN.startswith(start):
                return "", ""
            return "", self.flush()
        self._thinks = True
        place = self._held.find(CLOSE)
        end = place + len(CLOSE) if place >= 0 else len(self._held) - half_length(self._held, CLOSE)
        section = self._held[:end]
        self._held = self._held[end:]
        return section, self.flush() if place >= 0 else ""

    def flush(self) -> str:
        """Return the text held back; all further text is behind the section."""
        held = self._held
        self._held = ""
        self._is_over = True
        return held
