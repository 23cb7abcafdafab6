"""Choice of a format for each part of a model, for the least KL within a budget of bytes.

Parts are taken as independent, so their KL adds up. Each step along a part's convex hull of (bytes, KL) is bought in
the order of KL saved per byte, which is the exact optimum up to the last step (Everett, "Generalized Lagrange
Multiplier Method", Operations Research 11(3), 1963). The bytes left are then spent on single steps that fit.

Guard: tests/models/loading/test_bit_choice.py.
"""

import heapq
from collections.abc import Sequence

from msgspec import Struct

from headrace.models.checkpoint.quantization import Groups


class PartFormat(Struct, frozen=True):
    """One format of a part."""

    groups: Groups
    nbytes: int
    kl: float  # nats, predicted


def choose(parts: Sequence[Sequence[PartFormat]], budget: int) -> list[PartFormat]:
    """Return an option of each part, together of at most `budget` bytes, which must suffice for the smallest ones."""
    # From the smallest option of each part, the step that saves most for its bytes first.
    hulls = [_hull(options) for options in parts]
    at = [0] * len(hulls)  # of each part, the position in its hull
    left = budget - sum(hull[0].nbytes for hull in hulls)
    assert left >= 0, "the budget is smaller than the smallest choice"
    steps = [_step(hull, 0, number) for number, hull in enumerate(hulls) if len(hull) > 1]
    heapq.heapify(steps)
    while steps:
        _, number = heapq.heappop(steps)
        hull = hulls[number]
        position = at[number]
        more = hull[position + 1].nbytes - hull[position].nbytes
        if more > left:
            continue  # later steps of this part begin after this one
        left -= more
        at[number] = position + 1
        if position + 2 < len(hull):
            heapq.heappush(steps, _step(hull, position + 1, number))
    chosen = [hull[position] for hull, position in zip(hulls, at, strict=True)]
    return _spend(parts, chosen, left)


def _step(hull: Sequence[PartFormat], position: int, number: int) -> tuple[float, int]:
    """Return the KL that the next step saves per byte, negative for a heap, and the part's number."""
    now = hull[position]
    after = hull[position + 1]
    return (after.kl - now.kl) / (after.nbytes - now.nbytes), number


def _hull(options: Sequence[PartFormat]) -> list[PartFormat]:
    """Return the lower convex hull, by size, with falling KL."""
    hull: list[PartFormat] = []
    for option in sorted(options, key=lambda option: (option.nbytes, option.kl)):
        if hull and option.kl >= hull[-1].kl:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], option):
            hull.pop()
        hull.append(option)
    return hull


def _slope(smaller: PartFormat, larger: PartFormat) -> float:
    """Return the KL that a larger option adds per byte: negative where it saves KL."""
    return (larger.kl - smaller.kl) / (larger.nbytes - smaller.nbytes)


def _spend(parts: Sequence[Sequence[PartFormat]], chosen: list[PartFormat], left: int) -> list[PartFormat]:
    """Replace single options, by those that save most, until no better one fits into the bytes left."""
    while True:
        fitting = [
            (now.kl - option.kl, number, option)
            for number, (now, options) in enumerate(zip(chosen, parts, strict=True))
            for option in options
            if option.kl < now.kl and option.nbytes - now.nbytes <= left
        ]
        if not fitting:
            return chosen
        _, number, option = max(fitting, key=lambda entry: entry[:2])
        left -= option.nbytes - chosen[number].nbytes
        chosen[number] = option
