"""The protocol of constraints: the tokens that an answer may consist of.

A `Grammar` is compiled once and starts a `Constraint` for each sequence. The mask of a token depends on the tokens
before it, so it is filled in once these have been read, while the device computes the logits. V = vocabulary.

`models/text/structured/` implements both, for JSON schemas, regular expressions, grammars and tool calls. The engine
calls `masks` before each token (`Sequence.constrain_next`) and `accept` after it (`commit_batch`).
tests/runtime/engine/test_constraints.py has a constraint of its own.
"""

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx


class Constraint(Protocol):
    """State of one sequence: the tokens that may follow those accepted so far."""

    def masks(self, draft_tokens: Sequence[int], /) -> mx.array:
        """Return the allowed next tokens, and those after each draft token: (1 + draft tokens, V) bool.

        Rows after a draft token that is not allowed allow every token. The state is unchanged. Raises EngineError if
        no token is allowed, or if the masks exceed their limits of time and memory.
        """
        ...

    def accept(self, tokens: Sequence[int], /) -> None:
        """Advance by output tokens. Raises EngineError for a token that is not allowed."""
        ...

    def allowed(self, draft_tokens: Sequence[int], /) -> int:
        """Return how many leading draft tokens are allowed."""
        ...

    def forced(self) -> Sequence[int]:
        """Return the next tokens that have no alternative, possibly none."""
        ...


class Grammar(Protocol):
    """A compiled constraint."""

    def start(self) -> Constraint:
        """Return the state before the first token of an answer."""
        ...
