"""Proposers of a sequence, and draft tokens of the next pass: proposed per sequence, counted by the controller.

Of several proposers, that with the highest expected gain drafts for a sequence. If a sequence's newest token is not
read yet, its proposer drafts from the tokens before: the first draft token stands for the unread one. A proposer that
needs all tokens drafts then in no pass, and the next pass waits for it only if its draft tokens are expected to pay.
Draft tokens of a proposer with a `DryRun` are verified while the dry run pays, else only compared with the output.

The engine calls `add` between `Scheduler.plan` and `decode.start`, `proposers` at a sequence's admission, and
`save_costs` at the end of work. A new proposer is a class with the methods of `Proposer`, and a line in `proposers`.

Guards: tests/runtime/speculation/test_speculation.py and test_dry_run.py.
"""

import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul

import mlx.core as mx
from msgspec import Struct

from headrace.runtime.engine.draft_networks import DraftModel, MtpDraft
from headrace.runtime.engine.scheduler import ScheduledChunk, mean_context
from headrace.runtime.engine.sequence import Sequence as EngineSequence
from headrace.runtime.errors import UsageError
from headrace.runtime.network import Network
from headrace.runtime.sampling.sampler import Sampler
from headrace.runtime.speculation.acceptance import MTP_PRIOR, MTP_WEIGHT, Acceptance
from headrace.runtime.speculation.controller import GPU_ROWS, MIN_GAIN, ROWS, Controller
from headrace.runtime.speculation.dry_run import Pauses
from headrace.runtime.speculation.forced import ForcedTokens
from headrace.runtime.speculation.ngram import NGram, RecentAnswers
from headrace.runtime.speculation.pass_costs import PassCostStore
from headrace.runtime.speculation.proposer import MAX_DRAFT, Proposer, Speculation

Extend = Callable[[ScheduledChunk, tuple[int, ...], str], ScheduledChunk]
"""Adds draft tokens of a source to a chunk, as far as there is room."""
_MIN_NEW = 16  # new passes with draft tokens, from which on the file is written again


class _FirstDraft(Struct, frozen=True):
    """A proposer that has draft tokens for a sequence. chance: that its first one is accepted, the highest of all."""

    proposer: Proposer
    chance: float


class _Offer(Struct):
    """Draft tokens that a proposer could give one sequence.

    proposer: None if none has any.
    chances: of each token, that it and all before it are accepted.
    """

    proposer: Proposer | None = None
    chances: Sequence[float] = ()

    @property
    def cost_s(self) -> float:
        """Seconds to propose one of them."""
        return self.proposer.cost_s if self.proposer is not None else 0.0


class Drafting:
    """Drafting of one engine.

    network: its multi-token prediction head drafts, if it has one. Draft tokens beyond its vocabulary are dropped.
    draft: a smaller network of the same vocabulary, if any.
    costs: stored pass times, if any.
    """

    def __init__(self, network: Network, draft: Network | None = None, costs: PassCostStore | None = None) -> None:
        self._head = network.draft_head
        self._draft = draft
        stored_costs = None
        stored_rates: Sequence[float] = ()
        if costs is not None:
            stored_costs = costs.load()
            if self._head is not None:
                stored_rates = costs.load_rates()
        rows = GPU_ROWS if mx.default_device().type == mx.DeviceType.gpu else ROWS
        self.controller = Controller(stored_costs, rows)
        # Acceptance of a multi-token prediction head's tokens, by index in the draft:
        self.acceptance = Acceptance(MTP_PRIOR, stored_rates, MTP_WEIGHT)
        self.recent = RecentAnswers()  # that draft tokens come from
        self._pauses = Pauses()
        self._vocab_size = network.vocab_size
        self._costs = costs
        self._saved_passes = 0  # of those with draft tokens, at the last save
        self._context = 0  # mean cache entries of the pass's sequences
        self.spent_s = 0.0  # by networks that proposed draft tokens of the newest pass

    def check(self, speculate: Speculation) -> None:
        """Raise UsageError if a request wants draft tokens that nothing here can propose."""
        if speculate == "draft" and self._draft is None:
            raise UsageError("speculating with a draft needs a draft model")
        if speculate == "mtp" and self._head is None:
            raise UsageError("the model has no multi-token prediction head", "--speculate auto takes what there is")

    def proposers(self, sequence: EngineSequence) -> list[Proposer]:
        """Return proposers for a sequence: "auto" means all that need no other model. Sets `mtp` if one is its head."""
        choice = sequence.request.speculate
        proposers: list[Proposer] = []

        def sampler() -> Sampler:
            assert sequence.sampler is not None
            return sequence.sampler.fork()  # drafts change penalties and keys of the fork alone

        if choice in ("auto", "ngram"):
            proposers.append(NGram(sampled=sequence.request.sampling.temperature > 0, recent=self.recent))
        if choice in ("auto", "mtp") and self._head is not None:
            mtp = MtpDraft(self._head, sequence.limit, self.acceptance, sampler)
            sequence.mtp = mtp
            proposers.append(mtp)
        if choice == "draft":
            assert self._draft is not None
            proposers.append(DraftModel(self._draft, sequence.limit, self._vocab_size, sampler))
        if sequence.constraint is None:
            return proposers
        # Tokens without an alternative need no proposer; with some, each of them drafts after the forced tokens.
        return [ForcedTokens(sequence.constraint, inner) for inner in proposers or (None,)]

    def add(self, chunks: list[ScheduledChunk], extend: Extend) -> list[ScheduledChunk]:
        """Return the pass with draft tokens where they pay.

        extend: adds draft tokens to a chunk, as far as there is room.

        First each sequence's best draft is found, by its tokens' chances alone. Then the controller decides for all
        sequences at once how many of these tokens the pass verifies, since they share its time. The proposers draft so
        many at last.
        """
        self.spent_s = 0.0
        self._context = mean_context(chunks)
        if self._pauses.skip() or not all(chunk.chooses for chunk in chunks):
            return chunks
        batch = [chunk.sequence for chunk in chunks]
        if not self.controller.pays(len(batch), 1.0, context=self._context):  # not even if all were accepted
            for proposer in (proposer for sequence in batch for proposer in sequence.proposers):
                proposer.is_wanted = False
            return chunks
        firsts = [_first_drafts(sequence) for sequence in batch]
        offers, trials = self._offers(batch, firsts)
        self._start_dry_runs(batch, trials)
        is_offered = any(offer.chances for offer in offers)
        self._pauses.record(is_quiet=not is_offered and not any(trial.chances for trial in trials))
        if not is_offered:
            return chunks
        costs_s = [offer.cost_s for offer in offers]
        counts = self.controller.choose([offer.chances for offer in offers], costs_s, context=self._context)
        costs = self._costs_of(counts)
        drafted: list[ScheduledChunk] = []
        for chunk, offer, count, cost in zip(chunks, offers, counts, costs, strict=True):
            if offer.proposer is not None:
                offer.proposer.is_wanted = count > 0
            if offer.proposer is not None and count:
                drafted.append(self._with_draft(chunk, offer.proposer, count, cost, extend))
            else:
                drafted.append(chunk)
        return drafted

    def save_costs(self) -> None:
        """Save pass times, if enough are new."""
        if self._costs is None or self.controller.passes - self._saved_passes < _MIN_NEW:
            return
        self._saved_passes = self.controller.passes
        rates: Sequence[float] = ()
        if self._head is not None:
            rates = self.acceptance.rates
        self._costs.save(self.controller.measured, rates)

    def _offers(
        self, batch: Sequence[EngineSequence], firsts: Sequence[Sequence[_FirstDraft]]
    ) -> tuple[Sequence[_Offer], Sequence[_Offer]]:
        """Return each sequence's best draft to verify, and its draft for a dry run."""
        paying = self._paying_sources(firsts)
        offers: list[_Offer] = []
        trials: list[_Offer] = []
        for sequence, sequence_firsts in zip(batch, firsts, strict=True):
            proposers: list[Proposer] = []
            for first in sequence_firsts:
                if first.proposer.source in paying:
                    proposers.append(first.proposer)
                else:
                    first.proposer.is_wanted = False
            offer, trial = self._best_offers(sequence, proposers, len(batch))
            offers.append(offer)
            trials.append(trial)
        return offers, trials

    def _best_offers(
        self, sequence: EngineSequence, proposers: Sequence[Proposer], num_sequences: int
    ) -> tuple[_Offer, _Offer]:
        """Return a sequence's draft of the highest gain to verify, and one for a dry run; without tokens for none.

        proposers: those of the sequence whose draft tokens may pay.
        num_sequences: in the pass.
        """
        best = _Offer()
        trial = _Offer()
        unread = _unread(sequence)
        for proposer in proposers:
            if unread and proposer.needs_all_tokens:
                # It cannot draft for this pass. The next one waits for its tokens if that is expected to pay.
                offer = _Offer(proposer, _chances(sequence, proposer, unread=0))
                proposer.is_wanted = self._gain(offer, num_sequences) > MIN_GAIN
                continue
            offer = _Offer(proposer, _chances(sequence, proposer, unread))
            dry_run = proposer.dry_run
            if dry_run is not None:
                dry_run.update(sequence.tokens)
                if not dry_run.pays:
                    trial = offer
                    continue
                offer.chances = offer.chances[: dry_run.max_draft(len(offer.chances))]
            if not best.chances or self._gain(offer, num_sequences) > self._gain(best, num_sequences):
                best = offer
        return best, trial

    def _paying_sources(self, firsts: Sequence[Sequence[_FirstDraft]]) -> set[str]:
        """Return the sources whose most likely first draft token can pay."""
        best: dict[str, _FirstDraft] = {}  # by source
        for sequence_firsts in firsts:
            for first in sequence_firsts:
                other = best.get(first.proposer.source, first)
                best[first.proposer.source] = max(other, first, key=lambda each: (each.chance, each.proposer.cost_s))
        paying = {
            source
            for source, first in best.items()
            if self.controller.pays(len(firsts), first.chance, first.proposer.cost_s, context=self._context)
        }
        if "mtp" in best and "mtp" not in paying:
            self.acceptance.relax()  # else its rates would never be measured again
        return paying

    def _gain(self, offer: _Offer, num_sequences: int) -> float:
        return self.controller.gain(num_sequences, offer.chances, offer.cost_s, context=self._context)

    def _with_draft(
        self, chunk: ScheduledChunk, proposer: Proposer, count: int, cost: float, extend: Extend
    ) -> ScheduledChunk:
        """Return a chunk with draft tokens.

        count: at most so many.
        cost: excess cost of the pass for this sequence, for a dry run.
        extend: see `add`.
        """
        sequence = chunk.sequence
        draft_tokens = self._propose(sequence, proposer, count)
        if not draft_tokens:
            return chunk
        extended = extend(chunk, draft_tokens, proposer.source)
        if proposer.dry_run is not None and extended.draft_tokens:
            proposer.dry_run.start(_next_position(sequence), draft_tokens, cost)
        return extended

    def _start_dry_runs(self, batch: Sequence[EngineSequence], trials: Sequence[_Offer]) -> None:
        """Start dry runs of the draft tokens that would be verified."""
        if not any(trial.chances for trial in trials):
            return
        counts = self.controller.choose([trial.chances for trial in trials], context=self._context)
        for sequence, trial, count, cost in zip(batch, trials, counts, self._costs_of(counts), strict=True):
            proposer = trial.proposer
            if count and proposer is not None and proposer.dry_run is not None and not proposer.dry_run.pending:
                draft_tokens = self._propose(sequence, proposer, count)
                proposer.dry_run.start(_next_position(sequence), draft_tokens, cost)

    def _costs_of(self, counts: Sequence[int]) -> list[float]:
        """Return each sequence's share of the cost of draft tokens, in passes that give it one token each."""
        num_sequences = len(counts)
        total = sum(counts)
        if not total:
            return [0.0] * num_sequences
        excess = self.controller.excess(num_sequences, total, context=self._context)
        return [num_sequences * excess * count / total for count in counts]

    def _propose(self, sequence: EngineSequence, proposer: Proposer, count: int) -> tuple[int, ...]:
        """Return draft tokens. A proposer that raises is dropped."""
        began = time.perf_counter()
        unread = _unread(sequence)
        try:
            # The first draft token stands for the one that is not read yet, if any, so it is left out.
            draft_tokens = tuple(proposer.propose(count + unread)[unread : count + unread])
        except Exception:  # the answer goes on without draft tokens
            sequence.proposers.remove(proposer)
            return ()
        if proposer.cost_s:
            self.spent_s += time.perf_counter() - began
        for index, token in enumerate(draft_tokens):
            if not 0 <= token < self._vocab_size:
                return draft_tokens[:index]
        return draft_tokens


def _unread(sequence: EngineSequence) -> int:
    """Return the tokens that the in-flight pass chooses, 0 or 1."""
    return int(sequence.kv.length >= len(sequence.tokens))


def _next_position(sequence: EngineSequence) -> int:
    """Return the position of the next draft token."""
    return len(sequence.tokens) + _unread(sequence)


def _first_drafts(sequence: EngineSequence) -> Sequence[_FirstDraft]:
    """Return the proposers that have draft tokens for a sequence.

    None where a draft makes no sense: before the first token, at the last one, or if a token may be forced. All
    proposers are updated in any case.
    """
    firsts = []
    for proposer in sequence.proposers:
        try:
            proposer.update(sequence.tokens)
            if chances := proposer.chances(1):
                firsts.append(_FirstDraft(proposer, chances[0]))
        except Exception:  # the answer goes on without draft tokens
            sequence.proposers = [other for other in sequence.proposers if other is not proposer]
    if firsts and (not sequence.output_count or sequence.remaining <= 1 or sequence.may_force(MAX_DRAFT + 2)):
        return ()
    return firsts


def _chances(sequence: EngineSequence, proposer: Proposer, unread: int) -> Sequence[float]:
    """Return each draft token's chance that it and all before it are accepted. unread: draft tokens to leave out."""
    max_tokens = min(MAX_DRAFT, sequence.remaining - 1)
    try:
        return list(accumulate(proposer.chances(max_tokens + unread), mul))[unread : max_tokens + unread]
    except Exception:  # the answer goes on without draft tokens
        sequence.proposers.remove(proposer)
        return ()
