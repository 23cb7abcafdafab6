"""N-gram draft tokens (prompt lookup and suffix decoding): the continuation of earlier matches of a sequence's end.

Matches come from the sequence itself, and long ones from recent answers of other sequences. The token that most of them
continue with is drafted first, longer matches weighing more, and then what follows the longest of these matches. While
draft tokens are accepted, the match is followed without a search.

At the end of a long match a token may just have been replaced, as in a text repeated with changes. Until another match
is found, the draft resumes after that token, once.

An index of runs of tokens finds the matches: each run of `width` tokens leads to its latest occurrence, and each
occurrence to the one before. Time and memory per token are constant. With counts of the tokens that followed, a bounded
number of occurrences gives the drafts of suffix decoding (Oliaro et al. 2024, arXiv:2411.04975) without a tree.

The default proposer of every sequence. It runs in each step between two passes, so `update` has to stay cheap.
tests/runtime/speculation/test_ngram.py compares with a plain search.
"""

from collections.abc import Sequence
from typing import NamedTuple

from headrace.runtime.speculation.acceptance import GREEDY_PRIOR, LONGEST, SAMPLED_PRIOR, Acceptance
from headrace.runtime.speculation.dry_run import DryRun

END = -1  # after each recent answer
MAX_RECENT = 1 << 16  # tokens of recent answers
_MAX_MATCHES = 8  # occurrences of a run that are looked at
_RECENT_WIDTH = 6  # shorter matches in other answers are rarely accepted (docs/speculation.md)
_PAIR = 2  # shortest match in the sequence itself
_MAX_WEIGHT = 12  # match length from which longer ones weigh no more: 2 to the power of it
_MIN_RESUME = 9  # match length from which a draft resumes after a replaced token
_RESUMED = 6  # match length after an accepted resumption


class Match(NamedTuple):
    """An occurrence of a text's end.

    text: that it is in.
    position: of its continuation there.
    length: tokens that match before that position.
    """

    text: Sequence[int]
    position: int
    length: int


class Suffixes:
    """A text that grows, and its index. width: shortest match."""

    def __init__(self, width: int) -> None:
        self.tokens: list[int] = []
        self._width = width
        self._latest: dict[tuple[int, ...], int] = {}  # run -> position after its latest occurrence
        # By position: that after the previous occurrence of the same run. 0: none, as no run ends before `width`.
        self._before: list[int] = [0] * width

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
            matches.append(Match(text, position, length))
            position = self._before[position]
        return matches


class RecentAnswers:
    """The answers of ended sequences: at least the newest MAX_RECENT / 2 tokens, at most MAX_RECENT."""

    def __init__(self) -> None:
        self._newer = Suffixes(_RECENT_WIDTH)
        self._older = Suffixes(_RECENT_WIDTH)

    def add(self, tokens: Sequence[int]) -> None:
        """Add an answer."""
        max_tokens = MAX_RECENT // 2
        tokens = tokens[1 - max_tokens :]  # the newest: with END, no more than fit
        if len(self._newer.tokens) + len(tokens) >= max_tokens:
            self._older = self._newer  # proposers that follow a match in the text before keep it
            self._newer = Suffixes(_RECENT_WIDTH)
        self._newer.append([*tokens, END])

    def matches(self, end: Sequence[int]) -> list[Match]:
        """Return occurrences of a text's end, those in the newer answers first."""
        if not self._newer.tokens:
            return []
        return self._newer.matches(end) + self._older.matches(end)


class NGram:
    """N-gram proposer of one sequence.

    sampled: its tokens are not greedy, which lowers acceptance.
    recent: answers of other sequences; None: matches come from the sequence alone.
    """

    # See `Proposer` for these.
    source = "ngram"
    cost_s = 0.0
    needs_all_tokens = False
    is_wanted = True

    def __init__(self, *, sampled: bool = False, recent: RecentAnswers | None = None) -> None:
        self.dry_run: DryRun | None = DryRun()
        self.acceptance = Acceptance(SAMPLED_PRIOR if sampled else GREEDY_PRIOR)
        self._own = Suffixes(_PAIR)
        self._recent = recent
        # The match in use
        self._text: Sequence[int] = ()  # the text that it is in
        self._next = 0  # position of the next draft token there; 0: no match
        self._length = 0  # tokens of the match before that position; 0: it ended at a token that was replaced

    def update(self, tokens: Sequence[int]) -> None:
        """See `Proposer`. The first call indexes all tokens; later ones also verify the draft."""
        suffixes = self._own
        new = tokens[len(suffixes.tokens) :]
        suffixes.append(new)
        if self._next:
            for token in new:
                self._verify(token)
        if self._next and self._length >= LONGEST:  # no match is longer
            return
        matches = suffixes.matches(tokens)
        # Other answers are searched only while there is no match, or one of a few tokens.
        if self._recent is not None and (not self._next or self._length <= _RESUMED):
            matches += self._recent.matches(tokens)
        self._follow(matches)

    def chances(self, count: int) -> Sequence[float]:
        if not self._next:
            return ()
        # Lengths of the match before each draft token, if all before that are accepted
        lengths = list(range(self._length, self._length + count))
        if self._length == 0:  # as `_verify` counts after an accepted resumption
            lengths = [0, *range(_RESUMED, _RESUMED + count - 1)]
        return [self.acceptance.chance(length) for length in lengths]

    def propose(self, count: int) -> Sequence[int]:
        """See `Proposer`. Past the end of the sequence the draft repeats itself; past another answer it ends."""
        start = self._next
        text = self._text
        if not start:
            return ()
        draft = list(text[start : start + count])
        if text is not self._own.tokens:
            if END in draft:
                del draft[draft.index(END) :]
            return draft
        # The draft goes on as if the sequence had ended with it: by the tokens `period` before.
        period = len(text) - start
        while len(draft) < count:
            draft.append(draft[len(draft) - period])
        return draft

    def _verify(self, token: int) -> None:
        """Compare a new token with the draft, and move on, resume or drop the match."""
        if not self._next:
            return
        # In range: `update` has appended the new tokens to the own text, and END, which is never accepted, ends others.
        accepted = self._text[self._next] == token
        self.acceptance.record(self._length, accepted)
        if accepted and self._length:
            self._length += 1
            self._next += 1
        elif accepted:  # the token after a replaced one
            self._length = _RESUMED
            self._next += 1
        elif self._length >= _MIN_RESUME and self._text[self._next] != END:  # the token was replaced
            self._length = 0
            self._next += 1
        else:
            self._next = 0

    def _follow(self, matches: Sequence[Match]) -> None:
        """Follow the best match: the longest of those before the token with most votes.

        A match in use is replaced only by a longer one; a resumption, by one that is longer than a pair.
        """
        votes: dict[int, int] = {}  # by the token that follows a match
        longest: dict[int, Match] = {}  # the same
        for match in matches:
            token = match.text[match.position]
            if token == END:
                continue
            # Each further token that matches doubles a vote.
            votes[token] = votes.get(token, 0) + (1 << min(match.length, _MAX_WEIGHT))
            if token not in longest or match.length > longest[token].length:
                longest[token] = match
        if not votes:
            return
        text, position, length = longest[max(votes, key=votes.__getitem__)]
        if not self._next or length > (self._length or _PAIR):
            self._text = text
            self._next = position
            self._length = length
