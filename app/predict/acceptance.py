"""What guessing is worth: from the chance that a guess is right and what a step with guesses costs to a speed-up.

A step that verifies K guesses says at least one token, and one more for every guess that is right up to the first that
is wrong. With a chance p for each guess whose predecessors were right, that is 1 + p + p^2 + ... + p^K tokens
(Leviathan et al. 2023, equation 1). It costs c times a step without guesses: then it is 1 / c of that times as fast.
"""

from collections.abc import Mapping

GUESSES = (1, 2, 3, 4, 5, 7, 9, 11, 15)
"""How many a step may have, as far as it is looked at: up to 16 rows."""


def tokens_per_step(chance: float, guesses: int) -> float:
    """Tokens that a step with so many guesses says on average."""
    return sum(chance**count for count in range(guesses + 1))


def break_even(cost: float, guesses: int) -> float | None:
    """The chance from which a step with guesses is worth its `cost`, in steps without. None where no chance would do.

    0 where guesses cost nothing.
    """
    if cost <= 1:
        return 0.0
    if cost > guesses + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_per_step(middle, guesses) < cost else (low, middle)
    return (low + high) / 2


def best_guesses(costs: Mapping[int, float], chance: float) -> tuple[int, float]:
    """(guesses, speed-up) of what pays best: `costs` by guesses, in steps without; (0, 1.0) where nothing pays."""
    found = {guesses: tokens_per_step(chance, guesses) / cost for guesses, cost in costs.items()}
    return max([(0, 1.0), *found.items()], key=lambda pair: pair[1])
