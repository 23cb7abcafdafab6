"""The protocol of draft token proposers.

A proposer serves one sequence. Its draft tokens affect speed, never output.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

Speculation = Literal["off", "ngram", "draft"]
MAX_DRAFT = 15  # draft tokens per sequence and pass: rows up to 16 keep the bits that each has alone


class Proposer(Protocol):
    """Draft tokens for one sequence."""

    source: str
    """Name in records."""
    cost_s: float
    """Seconds to propose one draft token."""
    needs_all_tokens: bool
    """True if it cannot propose while the newest token is still on the device."""

    def update(self, tokens: Sequence[int], /) -> None:
        """Take all tokens of prompt and answer: those of the last call and more."""
        ...

    def chances(self, count: int, /) -> Sequence[float]:
        """Return for up to `count` draft tokens the chance of each, given that those before it are accepted."""
        ...

    def propose(self, count: int, /) -> Sequence[int]:
        """Return up to `count` draft tokens that follow the tokens of the last `update`."""
        ...
