"""Index of a text's token runs: earlier occurrences of its end, or of another text's, with match lengths.

Each run of `width` tokens leads to its latest occurrence, and each occurrence to the one before. Time and memory per
token are constant. With counts of the tokens that followed, a bounded number of occurrences gives the drafts of suffix
decoding (Oliaro et al. 2024, arXiv:2411.04975) without a tree.
"""

from collections.abc import Sequence

from headrace.runtime.speculation.acceptance import LONGEST

END = -1  # after each recent answer
MAX_RECENT = 1 << 16  # tokens of recent answers
_MAX_MATCHES = 8  # occurrences of a run that are looked at
_RECENT_WIDTH = 6  # shorter matches in other answers are rarely accepted (docs/speculation.md)

Match = tuple[Sequence[int], int, int]
"""Text, position of the continuation in it, length of the match."""


class Suffixes:
    """A text that grows, and its index. width: shortest match."""

    def __init__(self, width: int) -> None:
        self.tokens: list[int] = []
        self._width = width
        self._latest: dict[tuple[int, ...], int] = {}  # run -> position after its latest occurrence
        self._before: list[int] = [0] * width  # by position: that after the previous occurrence of the same run

    def append(self, tokens: Sequence[int]) -> None:
        """Append tokens. The run at the new end is not indexed yet: its earlier occurrences are found first."""
        text = self.tokens
        width = self._width
        latest = self._latest
        before = self._before
        text += tokens
        for position in range(len(before), len(text)):
            run = tuple(text[position - width : position])
            before.append(latest.get(run, 0))
            latest[run] = position

    def matches(self, end: Sequence[int]) -> list[Match]:
        """Return the latest occurrences of a text's end that have a continuation, the latest first."""
        text = self.tokens
        width = self._width
        matches = list[Match]()
        position = self._latest.get(tuple(end[-width:]), 0)
        while position and len(matches) < _MAX_MATCHES:
            length = width
            longest = min(LONGEST, position, len(end))
            while length < longest and text[position - 1 - length] == end[-1 - length]:
                length += 1
            matches.append((text, position, length))
            position = self._before[position]
        return matches


class RecentAnswers:
    """The answers of ended sequences: at least the newest MAX_RECENT / 2 tokens, at most MAX_RECENT."""

    def __init__(self) -> None:
        self._newer, self._older = Suffixes(_RECENT_WIDTH), Suffixes(_RECENT_WIDTH)

    def add(self, tokens: Sequence[int]) -> None:
        """Add an answer."""
        tokens = tokens[-MAX_RECENT // 2 + 1 :]
        if len(self._newer.tokens) + len(tokens) >= MAX_RECENT // 2:
            self._newer, self._older = Suffixes(_RECENT_WIDTH), self._newer
        self._newer.append([*tokens, END])

    def matches(self, end: Sequence[int]) -> list[Match]:
        if not self._newer.tokens:
            return []
        return self._newer.matches(end) + self._older.matches(end)
