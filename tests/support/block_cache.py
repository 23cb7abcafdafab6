"""A second KV cache that shares nothing with the first but the protocols: blocks of a few entries, out of order.

Slow on purpose: every pass gathers a sequence's blocks into fresh buffers, has the operations append to them, and puts
what was appended back, all of it evaluated at once. A network or an engine that assumes more than
`runtime.kv` (`KVCache`, `KVPass`, `KVBackend`) breaks here.
"""

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx

from headrace.models.network.decoder import Decoder
from headrace.runtime.kv.backend import KVOptions
from headrace.runtime.kv.cache import KVCache, KVPass, KVShape, PassRow
from headrace.runtime.kv.common_prefix import common_prefix
from headrace.runtime.ops import AttentionSpec, LayersNode, Ops, Phase, Projections

BLOCK = 5  # entries; no divisor of anything
NOTHING = float("nan")  # whoever reads too far will notice


class BlockCache(KVCache):
    """One sequence. A block holds BLOCK entries of every layer; `table` says which blocks hold the sequence."""

    def __init__(self, shape: KVShape, *, limit: int, ops: Ops) -> None:
        super().__init__(limit)
        self._shape = shape
        self._ops = ops
        self._pool: list[mx.array] = []  # each (layers, 2, Hkv, BLOCK, D)
        self._free: list[int] = []
        self.table: list[int] = []

    def attend(self, layer: int, qkv: Projections, spec: AttentionSpec) -> mx.array:
        tokens = qkv[0].shape[1]
        keys, values = self._gathered(layer, tokens)
        out, keys, values = self._ops.attend(qkv, keys, values, self.length, spec, 0, self._phase)
        mx.eval(out, keys, values)
        self._put_back(layer, keys, values, tokens)
        return out

    def run_fused(self, layers: slice, x: mx.array, node: LayersNode) -> mx.array:
        every = range(self._shape.layers)[layers]
        held = [self._gathered(layer, x.shape[1]) for layer in every]
        keys, values = ([side[part] for side in held] for part in (0, 1))
        out = node(x, keys, values, self.length, [0] * len(held), self._phase, x.shape[1])
        mx.eval(out)
        for layer, (keys, values) in zip(every, held, strict=True):
            self._put_back(layer, keys, values, x.shape[1])
        return out

    def reserve(self, tokens: int, phase: Phase = "prefill") -> None:
        self._phase = phase
        while len(self.table) * BLOCK < self.length + tokens:
            if not self._free:
                first = len(self._pool)
                shape = self._shape
                size = shape.format.block_shape(shape.layers, shape.kv_heads, BLOCK, shape.head_dim)
                for _ in range(3):
                    self._pool.append(mx.full(size, NOTHING, shape.format.dtype))
                self._free = [first + 1, first + 2, first]
            self.table.append(self._free.pop())

    def rollback(self) -> None:
        super().rollback()
        self._release()

    def trim(self, length: int) -> None:
        super().trim(length)
        self._release()

    @property
    def committed_bytes(self) -> int:
        return self.committed * self._shape.bytes_per_token

    @property
    def allocated_bytes(self) -> int:
        return sum(block.nbytes for block in self._pool)

    @property
    def arrays(self) -> list[mx.array]:
        return self._pool

    def _release(self) -> None:
        """Blocks that hold nothing any more go back."""
        used = -(-self.length // BLOCK)
        self._free = self.table[used:] + self._free
        del self.table[used:]

    def _gathered(self, layer: int, tokens: int) -> tuple[mx.array, mx.array]:
        """Keys and values of all entries, room for `tokens` more behind them: (1, Hkv, length + tokens, D) each."""
        end = self.length + tokens
        whole = mx.concatenate([self._pool[block][layer] for block in self.table], axis=-2)  # (2, Hkv, capacity, D)
        keys = mx.contiguous(whole[0:1, :, :end])
        values = mx.contiguous(whole[1:2, :, :end])
        mx.eval(keys, values)
        return keys, values

    def _put_back(self, layer: int, keys: mx.array, values: mx.array, tokens: int) -> None:
        for position in range(self.length, self.length + tokens):
            block = self.table[position // BLOCK]
            entry = position % BLOCK
            self._pool[block][layer, 0, :, entry] = keys[0, :, position]
            self._pool[block][layer, 1, :, entry] = values[0, :, position]
        mx.eval(self._pool)


class BlockPass:
    """A pass of one sequence."""

    runs_fused = True

    def __init__(self, row: PassRow) -> None:
        self.rows: Sequence[PassRow] = [row]
        self._cache = cast(BlockCache, row.cache)
        self._cache.reserve(row.count, row.phase)
        self.attend, self.run_fused = self._cache.attend, self._cache.run_fused

    def advance(self) -> None:
        self._cache.advance(self.rows[0].count)

    @property
    def arrays(self) -> list[mx.array]:
        return self._cache.arrays


class BlockBackend:
    """Each sequence has blocks of its own, and passes of its own."""

    pool = None
    rolls_back = True
    shares_prefixes = False
    copies_to_grow = False

    def __init__(self, network: "WithBlocks", options: KVOptions) -> None:
        self._network = network
        self._options = options
        self._last: tuple[KVCache, list[int]] | None = None  # of the sequence that ended last, with its tokens

    def acquire(self, prompt: Sequence[int], _entries: int = 0) -> KVCache:
        if self._last is None:
            return self._network.new_cache(self._options.limit)
        cache, tokens = self._last
        self._last = None
        shared = common_prefix(tokens, prompt[:-1])
        if not shared:
            return self._network.new_cache(self._options.limit)
        cache.trim(shared)
        return cache

    def release(self, cache: KVCache, tokens: Sequence[int]) -> None:
        if self._options.keep_prefix:
            self._last = cache, list(tokens[: cache.committed])

    def make_passes(self, rows: Sequence[PassRow]) -> list[KVPass]:
        return [BlockPass(row) for row in rows]

    def on_prefill(self, cache: KVCache, tokens: Sequence[int]) -> None:
        pass

    def evict(self) -> None:
        pass

    def trim(self) -> None:
        pass

    def clear(self) -> None:
        self._last = None


class WithBlocks:
    """A decoder whose caches are made of blocks."""

    def __init__(self, network: Decoder) -> None:
        self._network = network
        self.caches: list[BlockCache] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def kv_backend(self, options: KVOptions) -> BlockBackend:
        return BlockBackend(self, options)

    def new_cache(self, limit: int) -> BlockCache:
        cache = BlockCache(self._network.kv_shape, limit=limit, ops=self._network.ops)
        self.caches.append(cache)
        return cache
