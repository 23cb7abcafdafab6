"""Draft tokens from networks: a smaller model of the same vocabulary, or a checkpoint's multi-token prediction head.

Both have K/V of their own. The sequence's sampler chooses from their logits with the random keys of the same positions,
so where both networks agree, they sample the same token ("drafter-invariant" coupling, Daliri et al. 2024,
arXiv:2408.07978).

Both are `Proposer`s (`runtime/speculation/proposer.py`), made by `Drafting.proposers` for one sequence each. Output
never depends on them, so a mistake here costs speed, not correctness; tests/runtime/speculation/test_speculation.py
and tests/models/network/test_mtp.py cover them.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

import mlx.core as mx

from headrace.runtime.engine.decode import decode_step
from headrace.runtime.engine.prefill import feed, prefill
from headrace.runtime.engine.prompt_chunks import ChunkSizer
from headrace.runtime.kv.backend import KVOptions, one_pass
from headrace.runtime.metrics.running_median import RunningMedian
from headrace.runtime.network import DraftHead, Network
from headrace.runtime.ops.read_values import read_ints
from headrace.runtime.sampling.sampler import Sampler
from headrace.runtime.speculation.acceptance import Acceptance
from headrace.runtime.speculation.dry_run import DryRun
from headrace.runtime.speculation.proposer import MAX_DRAFT

MAX_WAITING = 2048  # hidden states that wait for a head; bounds their memory
_CHANCE = 0.7  # that a draft model's token is accepted, before any measurement
_MAX_DECODED = MAX_DRAFT + 1  # tokens that a draft model is fed without prefill: a step's accepted ones and the next
_CATCH_UP = 256  # entries that a head appends in one call, at most; a decode step waits for it
_NUM_COSTS = 9  # measured times in the median


class _NetworkDraft:
    """Draft tokens for one sequence: the half of `Proposer` that both networks share.

    acceptance: by index in the draft.
    sampler: returns a fork of the sequence's sampler.
    """

    needs_all_tokens = True
    dry_run: DryRun | None = None

    def __init__(self, acceptance: Acceptance, sampler: Callable[[], Sampler]) -> None:
        self.is_wanted = True
        self._acceptance = acceptance
        self._sampler = sampler
        self._costs = RunningMedian(_NUM_COSTS)
        self._tokens: Sequence[int] = ()  # the sequence's own list, which grows
        self._num_known = 0  # tokens at the last update
        self._draft_tokens: Sequence[int] = ()  # proposed since then

    @property
    def cost_s(self) -> float:
        return self._costs.median or 0.0

    def update(self, tokens: Sequence[int]) -> None:
        """See `Proposer`. Counts which draft tokens equal the tokens that came in their place."""
        self._record(tokens)

    def chances(self, count: int) -> Sequence[float]:
        return [self._acceptance.chance(index) for index in range(count)]

    def _record(self, tokens: Sequence[int]) -> int:
        """Take all tokens, and return how many of the draft tokens were accepted."""
        output = tokens[self._num_known : self._num_known + len(self._draft_tokens)]
        num_accepted = self._acceptance.record_draft(output, self._draft_tokens)
        self._tokens = tokens
        self._num_known = len(tokens)
        self._draft_tokens = ()
        return num_accepted


class DraftModel(_NetworkDraft):
    """Draft tokens from a smaller network of the same vocabulary.

    network: the draft model.
    limit: cache entries of the sequence.
    vocab_size: logits that the sampler takes; networks may pad one vocabulary differently.
    sampler: returns a fork of the sequence's sampler.
    """

    source = "draft"

    def __init__(self, network: Network, limit: int, vocab_size: int, sampler: Callable[[], Sampler]) -> None:
        super().__init__(Acceptance([_CHANCE] * MAX_DRAFT), sampler)
        self._vocab_size = vocab_size
        self._network = network
        self._kv = network.kv_backend(KVOptions(limit))
        self._cache = self._kv.acquire(())
        self._sizer = ChunkSizer()

    def update(self, tokens: Sequence[int]) -> None:
        """See `Proposer`. K/V of accepted draft tokens stay."""
        has_drafted = len(self._draft_tokens) > 0
        num_accepted = self._record(tokens)
        if has_drafted:
            # The last draft token has no entry: it was chosen, and not fed.
            self._cache.commit(min(num_accepted, self._cache.length - self._cache.committed))
            self._cache.rollback()

    def propose(self, count: int) -> Sequence[int]:
        """See `Proposer`. Feeds new tokens first, a prompt one chunk a call; no draft tokens until all are fed.

        So decoding continues meanwhile, and can be cancelled between chunks.
        """
        if not self._feed_new():
            return ()
        began = time.perf_counter()
        sampler = self._sampler()

        def sample(logits: mx.array) -> mx.array:
            return sampler(_fit(logits, self._vocab_size))

        chosen = [mx.array([self._tokens[-1]], mx.uint32)]
        for _ in range(count):
            kv_pass = one_pass(self._kv, self._cache, 1, "decode")
            chosen.append(decode_step(self._network, kv_pass, sample, chosen[-1]))
        draft_tokens = read_ints(mx.concatenate(chosen[1:]))  # without the known token that was fed first
        self._cache.commit(1)  # the entry of that token; those of draft tokens wait for `update`
        self._draft_tokens = draft_tokens
        self._costs.add((time.perf_counter() - began) / count)
        return draft_tokens

    def _feed_new(self) -> bool:
        """Feed all tokens but the last, or a chunk of them; return whether these were all."""
        new = self._tokens[self._cache.length : -1]
        if len(new) > _MAX_DECODED:
            num_fed = next(prefill(self._network, self._kv, self._cache, new, self._sizer))
            return num_fed == len(new)
        if new:
            kv_pass = one_pass(self._kv, self._cache, len(new), "decode", output=False)
            feed(self._network, kv_pass, mx.array(list(new), mx.uint32))
            self._cache.commit(len(new))
        return True


class _HiddenStates:
    """The network's hidden states of consecutive positions, of which a head has no entries yet.

    start: position of the first; the head's next entry is of this position.
    end: position after the last.
    """

    def __init__(self, start: int) -> None:
        self.start = start
        self.end = start
        self._parts: deque[mx.array] = deque()  # (1, T, E) each, in order

    def append(self, hidden: mx.array) -> None:
        """Add those of the positions from `end` on (1, T, E)."""
        self._parts.append(hidden)
        self.end += hidden.shape[1]

    def pop_first(self, count: int) -> mx.array:
        """Remove the first `count` positions -> (1, count, E)."""
        taken = list[mx.array]()
        lacking = count
        while lacking:
            hidden = self._parts.popleft()
            if hidden.shape[1] > lacking:
                self._parts.appendleft(hidden[:, lacking:])
                hidden = hidden[:, :lacking]
            taken.append(hidden)
            lacking -= hidden.shape[1]
        self.start += count
        return mx.concatenate(taken, axis=1)

    def drop_oldest(self) -> bool:
        """Drop the oldest until at most MAX_WAITING positions are left; return whether there were more."""
        had_more = self.end - self.start > MAX_WAITING
        while self.end - self.start > MAX_WAITING:
            self.start += self._parts.popleft().shape[1]
        return had_more


class MtpDraft(_NetworkDraft):
    """Draft tokens from a multi-token prediction head.

    The head's entry of position t needs the hidden state of t and token t + 1, and predicts token t + 2. Entries of
    committed positions have the network's hidden states. The head continues from its own ones, one draft token after
    the other, and the next `propose` rolls those entries back.

    With n tokens, `propose` finds one of three states, which `start` and `end` of `_waiting` tell:

        end != n - 1           the newest hidden states have not come: no draft tokens
        start == end == n - 1  an earlier call used them up: no draft tokens
        start < end == n - 1   a chunk of them becomes entries; draft tokens once none waits

    `take` adds hidden states. Positions whose hidden states never came (a reused prefix), or that were dropped because
    more than MAX_WAITING waited, have no entry: the head then starts again, and attends to later ones only.

    head: the multi-token prediction head.
    limit: cache entries of the sequence.
    acceptance: by index in the draft, shared by sequences.
    sampler: returns a fork of the sequence's sampler.
    """

    source = "mtp"

    def __init__(self, head: DraftHead, limit: int, acceptance: Acceptance, sampler: Callable[[], Sampler]) -> None:
        super().__init__(acceptance, sampler)
        self._head = head
        self._limit = limit
        self._waiting = _HiddenStates(0)
        self._new_cache()

    def close(self) -> None:
        """Free the head's K/V; no draft tokens are proposed afterwards."""
        self._cache.close()

    def take(self, start: int, hidden: mx.array) -> None:
        """See `TakesHidden`. Positions that were taken before are skipped."""
        known = self._waiting.end - start
        if known < 0:
            self._waiting = _HiddenStates(start)
            self._drop_entries()
        elif known:
            hidden = hidden[:, known:]
        if not hidden.shape[1]:
            return
        self._waiting.append(hidden)
        if self._waiting.drop_oldest():
            self._drop_entries()

    def propose(self, count: int) -> Sequence[int]:
        """See `Proposer`. No draft tokens while the head is more than a chunk behind: each call appends one."""
        self._cache.rollback()  # entries of earlier draft tokens
        waiting = self._waiting
        end = len(self._tokens) - 1  # the entry before the newest token predicts the next one
        if waiting.end != end or waiting.start >= end:
            return ()
        began = time.perf_counter()
        hidden = self._feed(min(_CATCH_UP, end - waiting.start))
        if waiting.start < end:
            mx.eval(hidden)  # now, since nothing else reads it
            return ()
        sampler = self._sampler()
        chosen: list[mx.array] = []
        while True:
            chosen.append(sampler(self._head.logits(hidden)))
            if len(chosen) == count:
                break
            hidden = self._append(chosen[-1][None], hidden[:, -1:])
        draft_tokens = read_ints(mx.concatenate(chosen))
        self._draft_tokens = draft_tokens
        self._costs.add((time.perf_counter() - began) / count)
        return draft_tokens

    def _feed(self, count: int) -> mx.array:
        """Append and commit the next `count` entries -> (1, count, E)."""
        after = self._waiting.start + 1  # each entry takes the token after its position
        tokens = mx.array([self._tokens[after : after + count]], mx.uint32)
        hidden = self._append(tokens, self._waiting.pop_first(count))
        self._cache.commit(count)
        return hidden

    def _append(self, tokens: mx.array, hidden: mx.array) -> mx.array:
        """Append the entries of tokens (1, T) and the hidden states before them (1, T, E) -> (1, T, E)."""
        count = tokens.shape[1]
        kv_pass = one_pass(self._kv, self._cache, count, "decode" if count == 1 else "prefill")
        result = self._head.hidden(tokens, hidden, kv_pass)
        kv_pass.advance()
        return result

    def _drop_entries(self) -> None:
        self._cache.close()
        self._new_cache()

    def _new_cache(self) -> None:
        self._kv = self._head.kv_backend(KVOptions(self._limit))
        self._cache = self._kv.acquire(())


def _fit(logits: mx.array, vocab_size: int) -> mx.array:
    """Pad or cut logits (1, V) of one padded vocabulary to (1, vocab_size) of another."""
    lacking = vocab_size - logits.shape[-1]
    if lacking > 0:
        logits = mx.pad(logits, [(0, 0), (0, lacking)], constant_values=-mx.inf)
    return logits[:, :vocab_size]
