"""The protocol of draft token proposers, and the rule by which their tokens are accepted.

A proposer serves one sequence. Its draft tokens affect speed, never output.

For each pass, `Drafting` calls `update`, then `chances`, and `propose` only if draft tokens are expected to pay.
`NGram`, `ForcedTokens`, `DraftModel` and `MtpDraft` implement it. A new one gets a line in `Drafting.proposers`, and a
name in `Speculation` if requests may choose it. An exception from it drops the proposer, not the sequence.

Guard: tests/runtime/speculation/test_speculation.py.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

import mlx.core as mx

from headrace.runtime.speculation.dry_run import DryRun

Speculation = Literal["off", "auto", "ngram", "mtp", "draft"]
MAX_DRAFT = 15  # draft tokens per sequence and pass: rows up to 16 keep the bits that each has alone


class Proposer(Protocol):
    """Draft tokens for one sequence."""

    source: str
    """Name in records."""
    needs_all_tokens: bool
    """True if it cannot propose while the newest token is still on the device."""
    is_wanted: bool
    """True if its draft tokens pay, as last estimated: no pass waits for tokens that only an unwanted one needs."""

    @property
    def cost_s(self) -> float:
        """Seconds to propose one draft token."""
        ...

    @property
    def dry_run(self) -> DryRun | None:
        """Decides when draft tokens are verified; None: always."""
        ...

    def update(self, tokens: Sequence[int], /) -> None:
        """Take all tokens of prompt and answer: those of the last call and more."""
        ...

    def chances(self, count: int, /) -> Sequence[float]:
        """Return for up to `count` draft tokens the chance of each, given that those before it are accepted."""
        ...

    def propose(self, count: int, /) -> Sequence[int]:
        """Return up to `count` draft tokens that follow the tokens of the last `update`."""
        ...


class TakesHidden(Protocol):
    """A proposer that drafts from the hidden states of the sequence's passes."""

    def take(self, start: int, hidden: mx.array, /) -> None:
        """Take the hidden states (1, T, E) of committed positions from `start`."""
        ...

    def close(self) -> None:
        """Free memory; nothing is taken or proposed afterwards."""
        ...


def num_accepted(chosen: Sequence[int], draft_tokens: Sequence[int]) -> int:
    """Return how many leading draft tokens equal the token chosen before each."""
    for index, token in enumerate(draft_tokens):
        if chosen[index] != token:
            return index
    return len(draft_tokens)
