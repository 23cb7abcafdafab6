"""Draft tokens of the next pass: proposed per sequence, counted by the controller.

If a sequence's newest token is not read yet, its proposer drafts from the tokens before: the first draft token stands
for the unread one. Proposers are updated only when draft tokens may pay. Draft tokens of a sequence with a `DryRun` are
verified while the dry run pays, else only compared with its output.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul

from headrace.runtime.engine import sequence as sequences
from headrace.runtime.engine.scheduler import ScheduledChunk
from headrace.runtime.speculation.controller import Controller
from headrace.runtime.speculation.pass_costs import PassCostStore
from headrace.runtime.speculation.proposer import MAX_DRAFT

Extend = Callable[[ScheduledChunk, tuple[int, ...], str], ScheduledChunk]
Sequenced = sequences.Sequence
_NEWS = 16  # new passes with draft tokens that are worth writing the file


class Drafting:
    """Drafting of one engine. vocab_size: draft tokens beyond it are dropped. costs: stored pass times, if any."""

    def __init__(self, vocab_size: int, costs: PassCostStore | None = None) -> None:
        self.controller = Controller(costs.load() if costs else None)
        self._vocab_size = vocab_size
        self._costs = costs
        self._kept = 0  # passes with draft tokens at the last save

    def add(self, chunks: list[ScheduledChunk], extend: Extend) -> list[ScheduledChunk]:
        """Return the pass with draft tokens where they pay. extend: adds them to a chunk, as far as there is room."""
        proposers = [chunk.sequence.proposer for chunk in chunks]
        if not all(chunk.chooses for chunk in chunks) or not any(proposers):
            return chunks
        pays, cost_s = self.controller.pays, max(proposer.cost_s for proposer in proposers if proposer)
        if not pays(len(chunks), 1.0, cost_s):
            return chunks
        first_chances = [_first_chance(chunk.sequence) for chunk in chunks]
        if not pays(len(chunks), max(first_chances), cost_s):
            return chunks
        chances = [
            _chances(chunk.sequence) if chance else () for chunk, chance in zip(chunks, first_chances, strict=True)
        ]
        verified = [_is_verified(chunk.sequence) for chunk in chunks]
        if not all(verified):
            self._dry_run(chunks, [() if paid else own for own, paid in zip(chances, verified, strict=True)])
            chances = [own if paid else () for own, paid in zip(chances, verified, strict=True)]
            if not any(chances):
                return chunks
        counts = self.controller.choose(chances, cost_s)
        costs = self._costs_of(counts)
        return [
            self._with(chunk, count, cost, extend) if count else chunk
            for chunk, count, cost in zip(chunks, counts, costs, strict=True)
        ]

    def keep(self) -> None:
        """Save pass times, if enough are new."""
        if self._costs is not None and self.controller.passes - self._kept >= _NEWS:
            self._kept = self.controller.passes
            self._costs.save(self.controller.measured)

    def _with(self, chunk: ScheduledChunk, count: int, cost: float, extend: Extend) -> ScheduledChunk:
        """Return a chunk with its draft tokens."""
        sequence, proposer = chunk.sequence, chunk.sequence.proposer
        draft_tokens = self._propose(sequence, count)
        if proposer is None or not draft_tokens:
            return chunk
        extended = extend(chunk, draft_tokens, proposer.source)
        if sequence.dry_run is not None and extended.draft_tokens:
            sequence.dry_run.start(_next_position(sequence), draft_tokens, cost)
        return extended

    def _dry_run(self, chunks: list[ScheduledChunk], chances: list[Sequence[float]]) -> None:
        """Start dry runs of the draft tokens that would be verified."""
        counts = self.controller.choose(chances)
        for chunk, count, cost in zip(chunks, counts, self._costs_of(counts), strict=True):
            sequence = chunk.sequence
            if count and sequence.dry_run is not None and not sequence.dry_run.pending:
                sequence.dry_run.start(_next_position(sequence), self._propose(sequence, count), cost)

    def _costs_of(self, counts: Sequence[int]) -> list[float]:
        """Return each sequence's share of the cost of draft tokens, in passes that give it one token each."""
        sequences, total = len(counts), sum(counts)
        excess = self.controller.excess(sequences, total) if total else 0.0
        return [sequences * excess * count / max(total, 1) for count in counts]

    def _propose(self, sequence: Sequenced, count: int) -> tuple[int, ...]:
        """Return draft tokens. A proposer that raises is dropped."""
        proposer, unread = sequence.proposer, _unread(sequence)
        if proposer is None:
            return ()
        try:
            draft_tokens = tuple(proposer.propose(count + unread)[unread : count + unread])
        except Exception:
            sequence.proposer = None
            return ()
        for place, token in enumerate(draft_tokens):
            if not 0 <= token < self._vocab_size:
                return draft_tokens[:place]
        return draft_tokens


def _unread(sequence: Sequenced) -> int:
    """Return the tokens that the in-flight pass chooses, 0 or 1."""
    return int(sequence.kv.length >= len(sequence.tokens))


def _next_position(sequence: Sequenced) -> int:
    """Return the position of the next draft token."""
    return len(sequence.tokens) + _unread(sequence)


def _is_verified(sequence: Sequenced) -> bool:
    """Return whether the sequence's draft tokens are verified, and not only compared with its output."""
    if sequence.dry_run is None:
        return True
    sequence.dry_run.update(sequence.tokens)
    return sequence.dry_run.pays


def _first_chance(sequence: Sequenced) -> float:
    """Return the first draft token's chance of acceptance, the highest of all; 0 without a proposer."""
    proposer = sequence.proposer
    if proposer is None or not sequence.output_count or sequence.remaining <= 1 or sequence.may_force(MAX_DRAFT + 2):
        return 0.0
    if proposer.needs_all_tokens and _unread(sequence):
        return 0.0
    try:
        proposer.update(sequence.tokens)
        return max(proposer.chances(1), default=0.0)
    except Exception:
        sequence.proposer = None
        return 0.0


def _chances(sequence: Sequenced) -> Sequence[float]:
    """Return each draft token's chance that it and all before it are accepted."""
    proposer, most, unread = sequence.proposer, min(MAX_DRAFT, sequence.remaining - 1), _unread(sequence)
    try:
        return list(accumulate(proposer.chances(most + unread), mul))[unread : most + unread] if proposer else ()
    except Exception:
        sequence.proposer = None
        return ()
