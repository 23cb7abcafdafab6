"""Index of texts by their token pairs: earlier occurrences of a text's end, with match lengths, and recent answers.

Each pair leads to its latest occurrence, and each occurrence to the one before. Time and memory per token are constant.
Together with counts of the tokens that followed, this gives the drafts of suffix decoding (Oliaro et al. 2024,
arXiv:2411.04975) from a bounded number of occurrences, without a tree.
"""

from collections.abc import Iterator, Sequence

from headrace.runtime.speculation.acceptance import LONGEST

END = -1  # behind each recent answer
MAX_RECENT = 1 << 16  # tokens of recent answers
_PAIR = 2
_BITS = 32  # of a token id in a key


class Suffixes:
    """One text that grows, with its index."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._latest: dict[int, int] = {}  # pair -> position behind its latest occurrence
        # By position: that behind the previous occurrence of the pair before it; 0: none, as for the first two.
        self._before: list[int] = [0, 0]

    def append(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        text, latest, before = self.tokens, self._latest, self._before
        first = max(len(text), _PAIR)
        text += tokens
        for position in range(first, len(text)):
            pair = text[position - 2] << _BITS | text[position - 1]
            before.append(latest.get(pair, 0))
            latest[pair] = position

    def matches(self, end: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
        """Yield the latest `most` occurrences of a text's end: the position behind it, and the length of the match."""
        if len(end) < _PAIR:
            return
        text, position = self.tokens, self._latest.get(end[-2] << _BITS | end[-1], 0)
        for _ in range(most):
            if not position:
                return
            found, longest = _PAIR, min(LONGEST, position, len(end))
            while found < longest and text[position - 1 - found] == end[-1 - found]:
                found += 1
            yield position, found
            position = self._before[position]


class RecentAnswers:
    """The answers of an engine's ended sequences: at least the newest MAX_RECENT / 2 tokens, at most MAX_RECENT."""

    def __init__(self) -> None:
        self._newer, self._older = Suffixes(), Suffixes()

    def add(self, tokens: Sequence[int]) -> None:
        """Add an answer."""
        if len(self._newer.tokens) + len(tokens) >= MAX_RECENT // 2:
            self._newer, self._older = Suffixes(), self._newer
        self._newer.append([*tokens[-MAX_RECENT // 2 + 1 :], END])

    def matches(self, end: Sequence[int], most: int) -> Iterator[tuple[Sequence[int], int, int]]:
        """Yield the latest `most` occurrences of a text's end: text, position behind it, and length of the match."""
        for texts in (self._newer, self._older):
            for position, length in texts.matches(end, most):
                yield texts.tokens, position, length
                most -= 1
