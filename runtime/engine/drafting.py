"""Guesses for the next pass: each sequence's own proposer asked, and the controller, how many of them ride along.

A sequence whose newest token is still to be read is guessed from those before it: the first guess stands for that
token, and those after it ride along. A proposer reads what was said when it is asked: where guesses cannot pay, as with
many sequences on a CPU, they take no time at all.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul

from headrace.runtime.engine import sequence as sequences
from headrace.runtime.engine.scheduler import Share
from headrace.runtime.speculation.controller import Controller
from headrace.runtime.speculation.pass_costs import PassCostStore
from headrace.runtime.speculation.proposer import MAX_DRAFT

Extend = Callable[[Share, tuple[int, ...], str], Share]
Sequenced = sequences.Sequence
_NEWS = 16  # passes with guesses that are worth writing a file


class Guesses:
    """One engine's. vocab_size: a guess beyond it is none. costs: where what passes cost is remembered, if anywhere."""

    def __init__(self, vocab_size: int, costs: PassCostStore | None = None) -> None:
        self.controller = Controller(costs.load() if costs else None)
        self._vocab_size = vocab_size
        self._costs = costs
        self._kept = 0  # passes with guesses, when costs were last kept

    def add(self, shares: list[Share], extend: Extend) -> list[Share]:
        """The pass with guesses where they pay: `extend` gives a share its own, as far as there is room."""
        proposers = [share.sequence.proposer for share in shares]
        if not all(share.chooses for share in shares) or not any(proposers):
            return shares
        pays, cost_s = self.controller.pays, max(proposer.cost_s for proposer in proposers if proposer)
        if not pays(len(shares), 1.0, cost_s):
            return shares
        likeliest = [_likeliest(share.sequence) for share in shares]
        if not pays(len(shares), max(likeliest), cost_s):
            return shares
        promises = [
            _promises(share.sequence) if chance else () for share, chance in zip(shares, likeliest, strict=True)
        ]
        counts = self.controller.choose(promises, cost_s)
        return [
            self._with(share, count, extend) if count else share for share, count in zip(shares, counts, strict=True)
        ]

    def keep(self) -> None:
        """Remember what passes cost, where enough of them are new."""
        if self._costs is not None and self.controller.passes - self._kept >= _NEWS:
            self._kept = self.controller.passes
            self._costs.save(self.controller.measured)

    def _with(self, share: Share, count: int, extend: Extend) -> Share:
        """A share with its guesses. A proposer that raises is not asked again."""
        sequence = share.sequence
        proposer, unread = sequence.proposer, _unread(sequence)
        if proposer is None:
            return share
        try:
            guesses = tuple(proposer.propose(count + unread)[unread : count + unread])
        except Exception:
            sequence.proposer = None
            return share
        for place, token in enumerate(guesses):
            if not 0 <= token < self._vocab_size:
                guesses = guesses[:place]
                break
        return extend(share, guesses, proposer.source)


def _unread(sequence: Sequenced) -> int:
    """Tokens that a pass under way chooses, 0 or 1."""
    return int(sequence.kv.length >= len(sequence.tokens))


def _likeliest(sequence: Sequenced) -> float:
    """The chance of its first guess, which is above that of those behind; 0 without any. One that raises has none."""
    proposer = sequence.proposer
    if proposer is None or not sequence.said or sequence.remaining <= 1:
        return 0.0
    if proposer.needs_all_tokens and _unread(sequence):
        return 0.0
    try:
        proposer.update(sequence.tokens)
        return max(proposer.chances(1), default=0.0)
    except Exception:
        sequence.proposer = None
        return 0.0


def _promises(sequence: Sequenced) -> Sequence[float]:
    """Of each guess for behind the token that is fed next: that it will be accepted."""
    proposer, most, unread = sequence.proposer, min(MAX_DRAFT, sequence.remaining - 1), _unread(sequence)
    try:
        return list(accumulate(proposer.chances(most + unread), mul))[unread : most + unread] if proposer else ()
    except Exception:
        sequence.proposer = None
        return ()
