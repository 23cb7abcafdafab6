"""Speed-up of speculative decoding from acceptance rate and step cost.

A step that verifies K draft tokens emits one token, and one more per accepted draft token up to the first rejection.
With an acceptance rate p per draft token that is 1 + p + p^2 + ... + p^K tokens (Leviathan et al. 2023, equation 1).
If the step costs c plain steps, the speed-up is that number / c.

`app/predict/document.py` predicts with it. `app/bench/measure/run_cost.py` measures the step costs of the same lengths.

Guard: tests/app/predict/test_acceptance.py.
"""

from collections.abc import Mapping

DRAFT_LENGTHS = (1, 2, 3, 4, 5, 7, 9, 11, 15)
"""Draft tokens per step, in predictions and in measurements of step costs: passes of up to 16 tokens."""


def tokens_per_step(rate: float, drafts: int) -> float:
    """Return the expected tokens of a step with so many draft tokens."""
    return sum(rate**count for count in range(drafts + 1))


def break_even(cost: float, drafts: int) -> float | None:
    """Return the acceptance rate from which a step of `cost` plain steps pays.

    None if it pays at no rate, 0 if its drafts are free.
    """
    if cost <= 1:
        return 0.0
    if cost > drafts + 1:
        return None
    # `tokens_per_step` grows with the rate: halve the interval until it is narrower than 1e-12.
    low = 0.0
    high = 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if tokens_per_step(middle, drafts) < cost:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def best_draft(costs: Mapping[int, float], rate: float) -> tuple[int, float]:
    """Return the best (draft tokens, speed-up); (0, 1.0) if none pays. costs: by draft tokens, in plain steps."""
    speeds = {0: 1.0} | {drafts: tokens_per_step(rate, drafts) / cost for drafts, cost in costs.items()}
    best = max(speeds, key=speeds.__getitem__)
    return best, speeds[best]
