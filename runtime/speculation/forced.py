"""Draft tokens that a constraint leaves no alternative to.

The braces, keys and separators of a JSON schema need no choice: a pass takes up to MAX_DRAFT of them as draft tokens,
and the constraint's masks accept them. So a forced token is verified like any other draft token, and the output does
not depend on it. Where a token is free, another proposer may draft.

`Drafting.proposers` wraps each proposer of a constrained sequence in one of these, so that its drafts keep to the
grammar, too. `source` and `cost_s` change with every `update`: they are those of whichever drafts next.

Guards: tests/runtime/engine/test_constraints.py.
"""

from collections.abc import Sequence

from headrace.runtime.sampling.constraint import Constraint
from headrace.runtime.speculation.dry_run import DryRun
from headrace.runtime.speculation.proposer import Proposer

_SOURCE = "grammar"
_CHANCE = 0.99  # of acceptance: a tokenizer may split a longer text differently


class ForcedTokens:
    """Proposer of a constrained sequence. inner: proposer of its other tokens, None for none."""

    def __init__(self, constraint: Constraint, inner: Proposer | None) -> None:
        self.source = _SOURCE
        self.cost_s = 0.0
        self.is_wanted = True
        self.needs_all_tokens = inner is not None and inner.needs_all_tokens
        self._constraint = constraint
        self._inner = inner
        self._tokens: Sequence[int] = ()

    @property
    def dry_run(self) -> DryRun | None:
        """See `Proposer`. Forced tokens need none."""
        if self._tokens or self._inner is None:
            return None
        return self._inner.dry_run

    def update(self, tokens: Sequence[int]) -> None:
        """See `Proposer`. Forced tokens come first; without any, the inner proposer drafts."""
        self._tokens = self._constraint.forced()
        self.source = _SOURCE
        self.cost_s = 0.0
        if self._inner is None:
            return
        self._inner.update(tokens)
        if not self._tokens:
            self.source = self._inner.source
            self.cost_s = self._inner.cost_s

    def chances(self, count: int) -> Sequence[float]:
        if self._tokens:
            return [_CHANCE] * min(count, len(self._tokens))
        if self._inner is None:
            return ()
        return self._inner.chances(count)

    def propose(self, count: int) -> Sequence[int]:
        """See `Proposer`. Tokens that the constraint forbids are cut."""
        if self._tokens:
            return self._tokens[:count]
        if self._inner is None:
            return ()
        draft = self._inner.propose(count)
        return draft[: self._constraint.allowed(draft)]
