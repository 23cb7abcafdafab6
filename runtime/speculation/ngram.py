"""Guesses from what the sequence itself has said or was asked: what followed the longest recent match of its end.

An index of pairs of tokens leads to where the end has occurred before, the latest first. Of the latest few occurrences
the one wins that the end agrees with furthest back; a match that went on to be right is followed without looking. Each
token costs one entry of the index and a bounded look, however long the sequence is.

Where a long match ends, a word may just have been replaced, as in a text that is given back with changes: until another
match is found it is guessed to go on behind that word, once.
"""

from collections.abc import Sequence

from headrace.runtime.speculation.acceptance import DRAWN, LIKELIEST, LONGEST, Acceptance

_LOOKS = 8  # occurrences of a pair that are looked at
_PAIR = 2
_BITS = 32  # of a token id in a key
_COPY = 9  # tokens of a match that is gone on with behind a token that differs
_RESUMED = 6  # that match's length, when the token behind was right


class NGram:
    """Prompt lookup, for one sequence. drawn: its tokens are, so that even what repeats does so less often."""

    source = "ngram"
    price_s = 0.0
    reads_all = False

    def __init__(self, *, drawn: bool = False) -> None:
        self.acceptance = Acceptance(DRAWN if drawn else LIKELIEST)
        self._tokens: Sequence[int] = ()
        self._known = 0  # tokens that were followed
        self._latest: dict[int, int] = {}  # a pair -> what comes after its latest occurrence: a position
        # Of each position, the occurrence before that of the pair in front of it; 0: none, as for the first two.
        self._before: list[int] = [0, 0]
        self._at = 0  # the position that is guessed to be said again; 0: none
        self._length = 0  # of the match in front of it; 0: it ended one token before

    def follow(self, tokens: Sequence[int]) -> None:
        """See `Proposer`. The first tokens are indexed, the others are also what had been guessed or was not."""
        self._tokens = tokens
        if not self._known:
            self._index(len(tokens))
        else:
            for position in range(self._known, len(tokens)):
                self._check(tokens[position])
            self._index(len(tokens))
        self._match()

    def chances(self, most: int) -> Sequence[float]:
        """See `Proposer`."""
        if not self._at:
            return ()
        chance, length = self.acceptance.chance, self._length
        first = [] if length else [chance(0)]
        following = range(length or _RESUMED, (length or _RESUMED) + most - len(first))
        return [*first, *[chance(length) for length in following]]

    def propose(self, count: int) -> Sequence[int]:
        """See `Proposer`. What would come from beyond the end is what was just guessed: a text that goes round."""
        at, tokens = self._at, self._tokens
        if not at:
            return ()
        guessed = list(tokens[at : at + count])
        while len(guessed) < count:
            guessed.append(guessed[at + len(guessed) - len(tokens)])
        return guessed

    def _check(self, token: int) -> None:
        """A token came: was it the one that was guessed?"""
        if not self._at:
            return
        right = self._tokens[self._at] == token
        self.acceptance.saw(self._length, right)
        if right:
            self._at += 1
            self._length = self._length + 1 if self._length else _RESUMED
        elif self._length >= _COPY:
            self._at += 1
            self._length = 0
        else:
            self._at = 0

    def _index(self, end: int) -> None:
        """Take in the tokens up to `end`, but for the pair that ends there: `_match` asks for those before it first."""
        tokens, latest, before = self._tokens, self._latest, self._before
        for position in range(max(_PAIR, self._known), end):
            pair = tokens[position - 2] << _BITS | tokens[position - 1]
            before.append(latest.get(pair, 0))
            latest[pair] = position
        self._known = end

    def _match(self) -> None:
        """Where the end has been before; what is being followed stays unless another is longer."""
        tokens, end = self._tokens, len(self._tokens)
        if end < _PAIR or (self._at and self._length >= LONGEST):
            return
        length = (self._length or _PAIR) if self._at else _PAIR - 1
        at = self._latest.get(tokens[-2] << _BITS | tokens[-1], 0)
        for _ in range(_LOOKS):
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
