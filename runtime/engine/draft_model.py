"""Draft tokens from a smaller network of the same vocabulary, with its own K/V.

The sequence's sampler chooses from the draft model's logits, with the random keys of the same positions. Where both
networks agree, they sample the same token ("drafter-invariant" coupling, Daliri et al. 2024, arXiv:2408.07978).
"""

import time
from collections.abc import Callable, Sequence

import mlx.core as mx

from headrace.runtime.engine.decode import decode_step
from headrace.runtime.engine.prefill import ChunkSizer, feed, prefill
from headrace.runtime.kv.backend import KVOptions, one_pass
from headrace.runtime.network import Network
from headrace.runtime.ops.read_values import read_ints
from headrace.runtime.sampling.sampler import Sampler
from headrace.runtime.speculation.acceptance import Acceptance
from headrace.runtime.speculation.dry_run import DryRun
from headrace.runtime.speculation.proposer import MAX_DRAFT

_CHANCE = 0.7  # of acceptance, before any measurement
_RUN = 16  # tokens fed in one pass without prefill
_NEW = 0.2  # the weight of a new measurement


class DraftModel:
    """Draft tokens for one sequence.

    network: the draft model.
    limit: cache entries of the sequence.
    vocab_size: logits that the sampler takes; networks may pad one vocabulary differently.
    sampler: returns a fork of the sequence's sampler.
    """

    source = "draft"
    needs_all_tokens = True
    is_wanted = True
    dry_run: DryRun | None = None

    def __init__(self, network: Network, limit: int, vocab_size: int, sampler: Callable[[], Sampler]) -> None:
        self.cost_s = 0.0
        self._vocab_size = vocab_size
        self._network = network
        self._sampler = sampler
        self._kv = network.kv_backend(KVOptions(limit))
        self._cache = self._kv.acquire(())
        self._sizer = ChunkSizer()
        self._acceptance = Acceptance([_CHANCE] * (MAX_DRAFT + 1))
        self._tokens: Sequence[int] = ()
        self._known = 0  # number of tokens at its last update
        self._draft_tokens: Sequence[int] = ()

    def update(self, tokens: Sequence[int]) -> None:
        """See `Proposer`. K/V of accepted draft tokens stay."""
        came = tokens[self._known : self._known + len(self._draft_tokens)]
        accepted = self._acceptance.record_draft(came, self._draft_tokens)
        if self._draft_tokens:
            self._cache.commit(min(accepted, self._cache.length - self._cache.committed))
            self._cache.rollback()
        self._tokens = tokens
        self._known = len(tokens)
        self._draft_tokens = ()

    def chances(self, count: int) -> Sequence[float]:
        return [self._acceptance.chance(index) for index in range(count)]

    def propose(self, count: int) -> Sequence[int]:
        """See `Proposer`. Feeds new tokens first, a prompt one chunk a call; no draft tokens until all are fed.

        So decoding continues meanwhile, and can be cancelled between chunks.
        """
        if not self._read():
            return ()
        began = time.perf_counter()
        sampler = self._sampler()

        def sample(logits: mx.array) -> mx.array:
            return sampler(_fit(logits, self._vocab_size))

        chosen = [mx.array([self._tokens[-1]], mx.uint32)]
        for _ in range(count):
            kv_pass = one_pass(self._kv, self._cache, 1, "decode")
            chosen.append(decode_step(self._network, kv_pass, sample, chosen[-1]))
        draft_tokens = read_ints(mx.concatenate(chosen[1:]))
        self._cache.commit(1)
        self._draft_tokens = draft_tokens
        token_s = (time.perf_counter() - began) / count
        if self.cost_s:
            self.cost_s += _NEW * (token_s - self.cost_s)
        else:
            self.cost_s = token_s
        return draft_tokens

    def _read(self) -> bool:
        """Feed all tokens but the last, or a chunk of them; return whether these were all."""
        new = self._tokens[self._cache.length : -1]
        if len(new) > _RUN:
            num_fed = next(prefill(self._network, self._kv, self._cache, new, self._sizer))
            return num_fed == len(new)
        if new:
            kv_pass = one_pass(self._kv, self._cache, len(new), "decode", output=False)
            feed(self._network, kv_pass, mx.array(list(new), mx.uint32))
            self._cache.commit(len(new))
        return True


def _fit(logits: mx.array, vocab_size: int) -> mx.array:
    """Pad or cut logits (1, V) of one padded vocabulary to (1, vocab_size) of another."""
    lacking = vocab_size - logits.shape[-1]
    if lacking > 0:
        logits = mx.pad(logits, [(0, 0), (0, lacking)], constant_values=-mx.inf)
    return logits[:, :vocab_size]
