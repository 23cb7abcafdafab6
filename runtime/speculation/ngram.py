"""N-gram draft tokens (prompt lookup decoding): the continuation of the longest recent match of a sequence's end.

An index of token pairs leads to earlier occurrences of the end, the latest first. The occurrence with the longest
match among the latest few wins. While draft tokens are accepted, the match is followed without a search. Time per
token is constant, however long the sequence is.

At the end of a long match a token may just have been replaced, as in a text repeated with changes. Until another match
is found, the draft resumes behind that token, once.
"""

from collections.abc import Sequence

from headrace.runtime.speculation.acceptance import GREEDY_PRIOR, LONGEST, SAMPLED_PRIOR, Acceptance
from headrace.runtime.speculation.dry_run import DryRun

_MAX_LOOKUPS = 8  # occurrences of a pair
_PAIR = 2
_BITS = 32  # of a token id in a key
_MIN_RESUME = 9  # match length from which a draft resumes behind a replaced token
_RESUMED = 6  # match length after an accepted resumption


class NGram:
    """N-gram proposer of one sequence. sampled: its tokens are not greedy, which lowers acceptance."""

    source = "ngram"
    cost_s = 0.0
    needs_all_tokens = False
    is_wanted = True

    def __init__(self, *, sampled: bool = False) -> None:
        self.dry_run: DryRun | None = DryRun()
        self.acceptance = Acceptance(SAMPLED_PRIOR if sampled else GREEDY_PRIOR)
        self._tokens: Sequence[int] = ()
        self._indexed = 0  # tokens
        self._latest: dict[int, int] = {}  # pair -> position after its latest occurrence
        # By position: the position after the previous occurrence of the pair before it; 0: none, as for the first two.
        self._before: list[int] = [0, 0]
        self._at = 0  # position of the next draft token; 0: none
        self._length = 0  # of the match in front of it; 0: it ended one token before

    def update(self, tokens: Sequence[int]) -> None:
        """See `Proposer`. The first call indexes all tokens; later ones also verify the draft."""
        self._tokens = tokens
        if self._indexed:
            for position in range(self._indexed, len(tokens)):
                self._verify(tokens[position])
        self._index(len(tokens))
        self._match()

    def chances(self, count: int) -> Sequence[float]:
        """See `Proposer`."""
        if not self._at:
            return ()
        chance, length = self.acceptance.chance, self._length
        first = [] if length else [chance(0)]
        following = range(length or _RESUMED, (length or _RESUMED) + count - len(first))
        return [*first, *[chance(length) for length in following]]

    def propose(self, count: int) -> Sequence[int]:
        """See `Proposer`. Past the end of the sequence the draft repeats itself."""
        at, tokens = self._at, self._tokens
        if not at:
            return ()
        draft = list(tokens[at : at + count])
        while len(draft) < count:
            draft.append(draft[at + len(draft) - len(tokens)])
        return draft

    def _verify(self, token: int) -> None:
        """Compare a new token with the draft, and move on, resume or drop the match."""
        if not self._at:
            return
        accepted = self._tokens[self._at] == token
        self.acceptance.record(self._length, accepted)
        if accepted:
            self._at += 1
            self._length = self._length + 1 if self._length else _RESUMED
        elif self._length >= _MIN_RESUME:
            self._at += 1
            self._length = 0
        else:
            self._at = 0

    def _index(self, end: int) -> None:
        """Index the pairs before `end`, except the one that ends there: `_match` needs the earlier ones first."""
        tokens, latest, before = self._tokens, self._latest, self._before
        for position in range(max(_PAIR, self._indexed), end):
            pair = tokens[position - 2] << _BITS | tokens[position - 1]
            before.append(latest.get(pair, 0))
            latest[pair] = position
        self._indexed = end

    def _match(self) -> None:
        """Find the longest match of the sequence's end; a match in use is replaced only by a longer one."""
        tokens, end = self._tokens, len(self._tokens)
        if end < _PAIR or (self._at and self._length >= LONGEST):
            return
        length = (self._length or _PAIR) if self._at else _PAIR - 1
        at = self._latest.get(tokens[-2] << _BITS | tokens[-1], 0)
        for _ in range(_MAX_LOOKUPS):
            if not at:
                break
            found = _PAIR
            while found < LONGEST and found < at and tokens[at - 1 - found] == tokens[end - 1 - found]:
                found += 1
            if found > length:
                self._at = at
                self._length = length = found
                if found == LONGEST:
                    break
            at = self._before[at]
