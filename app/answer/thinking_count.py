"""Number of tokens in an answer's thinking section."""

from collections.abc import Iterable

from headrace.models.text.thinking import CLOSE, OPEN


class ThinkingCount:
    """tokens: those so far that completed text of the section, tags included; 0 without a section."""

    def __init__(self, *, thinking: bool) -> None:
        """thinking: the prompt ends within the section."""
        self.tokens = 0
        self._tail = OPEN if thinking else ""
        self._begun, self._over = thinking, False

    def add(self, pieces: Iterable[str]) -> None:
        """Take the text that each token completed."""
        for piece in pieces:
            if self._over:
                return
            self.tokens += 1
            self._tail = (self._tail + piece) if self._begun else (self._tail + piece).lstrip()
            if not self._begun and not self._tail.startswith(OPEN):
                self._over = not OPEN.startswith(self._tail)
                self.tokens = 0 if self._over else self.tokens
                continue
            self._begun, self._over = True, CLOSE in self._tail
            self._tail = self._tail[1 - len(CLOSE) :]

    def finish(self) -> None:
        """Take the end of the answer: half a tag is no section."""
        if not self._begun:
            self.tokens = 0
