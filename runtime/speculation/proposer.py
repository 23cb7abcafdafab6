"""What guesses the tokens of a sequence: the protocol, and who may be asked.

A proposer is one sequence's own. Whatever it says, raises or leaves out costs speed at most.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

Speculation = Literal["off", "ngram", "draft"]
MOST = 15  # guesses behind a token: so many rows more have the bits that each has alone


class Proposer(Protocol):
    """Told what is said, asked what comes."""

    source: str
    """Its name in records."""
    price_s: float
    """What a guess costs before it is verified."""
    reads_all: bool
    """Whether it can only go on from all tokens, and not while the newest is still to be read."""

    def follow(self, tokens: Sequence[int], /) -> None:
        """All tokens there are, prompt and answer: those of the last call and more."""
        ...

    def chances(self, most: int, /) -> Sequence[float]:
        """Of each guess it has, at most so many: that it is right where those before it are."""
        ...

    def propose(self, count: int, /) -> Sequence[int]:
        """The first so many tokens that it guesses to follow on those of the last `follow`, or fewer."""
        ...
