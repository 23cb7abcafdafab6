"""Bounds on differences of logits that have the same terms, added in another order."""

UNIT = 2.0**-24
"""Unit roundoff of float32."""
_LIKELY = 2.0
"""Factor by which sums exceed the expected error with a probability of less than one in a thousand."""
_SUMS_PER_LAYER = 4  # one after another: q/k/v, output, up, down


def logits_bound(terms: int, layers: int) -> float:
    """Return a bound on the difference of the logits of two float32 computations, relative to the largest logit.

    terms: of the longest sum, the most columns of a matrix. A sum of n terms is off by about sqrt(n) unit roundoffs
    of its magnitude, whatever the order (Higham and Mary, "A new approach to probabilistic rounding error analysis",
    2019). The errors of sums that follow each other add up. Instruction sets have other orders: no figure that was
    found on one holds for all.
    """
    sums = _SUMS_PER_LAYER * layers + 1
    computations = 2
    return float(_LIKELY * computations * sums * UNIT * terms**0.5)
