"""A decoder with K/V in blocks of one pool, out of order, and hand-made passes."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from headrace.models.network.decoder import Decoder
from headrace.runtime.kv.paged_cache import KVPool, PagedCache
from headrace.runtime.ops import BLOCK


class WithPool:
    """The network with other caches."""

    def __init__(self, network: Decoder, entries: int = 32 * BLOCK) -> None:
        self._network = network
        self.pool = KVPool(network.kv_shape, network.ops, entries)
        self.caches: list[PagedCache] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def make_cache(self, limit: int) -> PagedCache:
        """Return a cache whose first block is not the pool's first."""
        other = self.pool.make_cache(3 * BLOCK)
        other.reserve(3 * BLOCK)
        cache = self.pool.make_cache(limit)
        cache.reserve(1)
        other.close()
        self.caches.append(cache)
        return cache


def feed(network: Any, cache: Any, tokens: Sequence[int], chunk: int = 64) -> None:
    for start in range(0, len(tokens), chunk):
        part = list(tokens[start : start + chunk])
        cache.reserve(len(part))
        network.layers(network.embed(mx.array([part])), cache)
        cache.advance(len(part))
        mx.eval(cache.arrays)
        cache.commit(len(part))


def say(network: Any, cache: Any, tokens: Sequence[int]) -> mx.array:
    """Return logits (steps, V) of steps that feed `tokens`, queued one step ahead as in the engine."""
    seen = []
    for token in tokens:
        cache.reserve(1, "decode")
        seen.append(network.logits(network.layers(network.embed(mx.array([[token]])), cache)))
        cache.advance(1)
        mx.async_eval(seen[-1])
        cache.commit(cache.length - cache.committed - 1)
    mx.eval(seen)
    cache.commit(1)
    return mx.concatenate(seen)
