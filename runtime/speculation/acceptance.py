"""How often guesses turn out right, by the length of the match they rest on: a running estimate with a prior."""

from collections.abc import Sequence

LONGEST = 24  # matches from here on are alike
_MEMORY = 32.0  # guesses after which older ones count half
_TRUST = 4.0  # guesses that the prior is worth


def _prior(length: int) -> float:
    """Text that has repeated so many tokens goes on repeating, this often."""
    return 1 - 2.5 / (length + 2)


_PRIORS = [max(0.15, _prior(length)) for length in range(LONGEST + 1)]


class Acceptance:
    """`saw` what came, ask for a `chance`."""

    def __init__(self, priors: Sequence[float] = _PRIORS) -> None:
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
