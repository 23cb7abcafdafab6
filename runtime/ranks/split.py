"""Division of a model among ranks, in proportion to their shares.

Numbers only. `app/hosts/` chooses the shares; networks divide layers (pipeline) or heads and columns (tensor) by
`Split.ranges`, each rank for itself, so the same shares have to give the same ranges everywhere.

Guard: tests/models/network/test_rank_parts.py.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Literal

from msgspec import Struct

from headrace.runtime.errors import UsageError


class Split(Struct, frozen=True):
    """A way to divide a model.

    kind: "tensor": every rank has a part of every layer; "pipeline": every rank has whole layers.
    shares: a number above 0 for each rank; only their proportions count.
    """

    kind: Literal["tensor", "pipeline"]
    shares: tuple[float, ...]

    @property
    def fractions(self) -> list[float]:
        """Each rank's part of the whole, 0 to 1."""
        return [share / sum(self.shares) for share in self.shares]

    def ranges(self, units: int) -> list[range]:
        """Return each rank's units of `units`, in order, at least one each. Raises UsageError for fewer than ranks."""
        return divided(units, self.shares)


def divided(units: int, shares: Sequence[float]) -> list[range]:
    """Return consecutive ranges of 0 to `units`, in proportion to `shares`, none of them empty."""
    if not shares or min(shares) <= 0:
        raise UsageError(f"shares of ranks must be positive, not {list(shares)}")
    if units < len(shares):
        raise UsageError(f"{units} parts cannot be divided among {len(shares)} ranks")
    total = sum(shares)
    edges = [0]
    for rank, share in enumerate(accumulate(shares), 1):
        least = edges[-1] + 1  # one unit for this rank
        max_units = units - (len(shares) - rank)  # one for each later rank
        edges.append(min(max_units, max(least, round(units * share / total))))
    return [range(first, last) for first, last in pairwise(edges)]
