"""How often guesses turn out right, by the length of the match they rest on: a running estimate with a prior."""

from collections.abc import Sequence

LONGEST = 24  # matches from here on are alike
_MEMORY = 64.0  # guesses after which older ones count half
_TRUST = 8.0  # guesses that the prior is worth

# What n-grams' guesses came to over answers of all kinds, greedy ones and drawn ones (docs/speculation.md). By the
# length of the match; that of none is a guess that goes on behind a token that was replaced.
LIKELIEST = (0.4, 0.25, 0.3, 0.5, 0.65, 0.76, 0.8, 0.83, 0.86, 0.88, *[0.9] * 7, *[0.95] * 7, 0.97)
DRAWN = (0.25, 0.12, 0.25, 0.45, 0.6, 0.65, 0.7, 0.7, 0.72, 0.74, *[0.8] * 7, *[0.88] * 7, 0.93)


class Acceptance:
    """`saw` what came, ask for a `chance`."""

    def __init__(self, priors: Sequence[float]) -> None:
        """priors: by length; what is longer is as the last."""
        self._right = [_TRUST * prior for prior in priors]
        self._all = [_TRUST] * len(priors)

    def saw(self, length: int, right: bool) -> None:
        """A guess on a match of `length` tokens was right, or was not."""
        at = min(length, len(self._all) - 1)
        self._right[at] += right
        self._all[at] += 1
        if self._all[at] > _MEMORY:
            self._right[at] /= 2
            self._all[at] /= 2

    def chance(self, length: int) -> float:
        """That the next guess on a match of `length` tokens is right."""
        at = min(length, len(self._all) - 1)
        return self._right[at] / self._all[at]
