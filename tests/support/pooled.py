"""A decoder whose sequences have their K/V in blocks of one pool, out of order; passes made by hand."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from headrace.models.network.decoder import Decoder
from headrace.runtime.kv.paged import BlockTable
from headrace.runtime.kv.paged_arrays import PagedArrays
from headrace.runtime.kv.pool import BlockPool, make_pool
from headrace.runtime.ops import BLOCK
from tests.support.alone import Alone


def pool_of(network: Decoder, entries: int, key: bytes = b"") -> BlockPool:
    return make_pool(PagedArrays(network.kv_shape, network.ops), entries, key)


def table(pool: BlockPool, limit: int) -> Any:
    """An empty cache in blocks."""
    return Alone(BlockTable(pool, limit))


class WithPool:
    """The network, with a pool beside it."""

    def __init__(self, network: Decoder, entries: int = 32 * BLOCK) -> None:
        self._network = network
        self.pool = pool_of(network, entries)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def new_cache(self, limit: int) -> Any:
        """A cache whose first block is not the first of the pool: what comes after it is."""
        other = table(self.pool, 3 * BLOCK)
        other.reserve(3 * BLOCK)
        cache = table(self.pool, limit)
        cache.reserve(1)
        other.close()
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
    """Logits (steps, V) of steps that feed `tokens`, one step ahead of the reader as the engine is."""
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
