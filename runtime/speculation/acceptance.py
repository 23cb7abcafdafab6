"""Acceptance rates of draft tokens: a running estimate with a prior.

N-gram proposers count by match length, networks (draft models and prediction heads) by index in the draft. Rates decide
only how many tokens are drafted, so a wrong one costs speed.

Guard: tests/runtime/speculation/test_ngram.py.
"""

from collections.abc import Sequence

LONGEST = 24  # longer matches share one estimate
_HALF_LIFE = 64.0  # draft tokens after which older ones count half
_PRIOR_WEIGHT = 8.0  # draft tokens that a prior counts for
MTP_WEIGHT = 4.0  # the same of a head: one that is never right costs few passes
_RELAX = 1 / 256  # of the distance to the prior

# Acceptance of n-gram draft tokens at greedy and at sampled decoding (docs/speculation.md), by match length from 0 to
# LONGEST: 25 rates. Length 0 is the first draft token after a replaced token.
GREEDY_PRIOR = (0.4, 0.25, 0.3, 0.5, 0.65, 0.76, 0.8, 0.83, 0.86, 0.88, *[0.9] * 7, *[0.95] * 7, 0.97)
SAMPLED_PRIOR = (0.25, 0.12, 0.25, 0.45, 0.6, 0.65, 0.7, 0.7, 0.72, 0.74, *[0.8] * 7, *[0.88] * 7, 0.93)

# The same of a multi-token prediction head, by index in the draft: published rates of heads of depth 1, which are run
# once more for each further token.
MTP_PRIOR = (0.75, 0.65, 0.55, 0.5, 0.45)


class Acceptance:
    """Acceptance rate by index, starting from `priors`; larger indices use the last rate.

    An index is the match length before an n-gram draft token, or the place of a network's token in the draft.

    priors: rates at the beginning.
    stored: `rates` of an earlier run, which replace the priors.
    weight: draft tokens that a prior counts for.
    """

    def __init__(self, priors: Sequence[float], stored: Sequence[float] = (), weight: float = _PRIOR_WEIGHT) -> None:
        self._priors = priors
        priors = [*stored[: len(priors)], *priors[len(stored) :]]
        self._accepted = [weight * prior for prior in priors]
        self._verified = [weight] * len(priors)

    def record(self, index: int, accepted: bool) -> None:
        """Count a verified draft token with this index."""
        index = min(index, len(self._verified) - 1)
        self._accepted[index] += accepted
        self._verified[index] += 1
        if self._verified[index] > _HALF_LIFE:  # halving both keeps the rate, and lets newer tokens count more
            self._accepted[index] /= 2
            self._verified[index] /= 2

    def record_draft(self, output: Sequence[int], draft_tokens: Sequence[int]) -> int:
        """Count a draft's tokens by index, up to the first that was not accepted; return the number accepted."""
        for index, (token, draft) in enumerate(zip(output, draft_tokens, strict=False)):
            self.record(index, token == draft)
            if token != draft:
                return index
        return min(len(output), len(draft_tokens))

    def chance(self, index: int) -> float:
        """Return the chance that a draft token with this index is accepted."""
        index = min(index, len(self._verified) - 1)
        return self._accepted[index] / self._verified[index]

    @property
    def rates(self) -> list[float]:
        """All rates, by index."""
        return [self.chance(index) for index in range(len(self._verified))]

    def relax(self) -> None:
        """Move all rates a little towards their priors: draft tokens that do not pay are tried again at some time."""
        for index, prior in enumerate(self._priors):
            self._accepted[index] += _RELAX * (prior * self._verified[index] - self._accepted[index])
