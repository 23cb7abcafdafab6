"""K/V backend of mlx-lm's caches: one list of mlx-lm's own caches per sequence."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import mlx.core as mx

from headrace.models.mlx_lm.batch import batch_parts, worth_batching
from headrace.models.mlx_lm.cache import MlxLmCache
from headrace.models.mlx_lm.disk import load_cache, store_cache
from headrace.models.mlx_lm.prefixes import PrefixCaches
from headrace.runtime.kv.backend import KVOptions
from headrace.runtime.kv.cache import KVCache, KVPass, PassRow
from headrace.runtime.kv.disk import DiskStore
from headrace.runtime.metrics.cost import StepCost
from headrace.runtime.ops import AttentionSpec, LayersNode, MixerSpec, Projections


class MlxLmPass:
    """One row, or one token each of several. The model gets `parts`; its layers append and attend."""

    runs_fused = False

    def __init__(self, rows: Sequence[PassRow]) -> None:
        self.rows = rows
        self._caches = [cast(MlxLmCache, row.cache) for row in rows]
        for cache, row in zip(self._caches, rows, strict=True):
            if cache.needs_marks and row.phase == "decode" and row.count > 1:
                cache.hold()
        parts = [cache.parts for cache in self._caches]
        self.parts: Sequence[Any] = parts[0] if len(parts) == 1 else batch_parts(parts)

    def attend(self, _layer: int, _qkv: Projections, _spec: AttentionSpec) -> mx.array:
        raise NotImplementedError("mlx-lm's classes attend by themselves")

    def mix(self, _layer: int, _x: mx.array, _spec: MixerSpec) -> mx.array:
        raise NotImplementedError("mlx-lm's classes keep their recurrent state by themselves")

    def run_fused(self, _layers: slice, _x: mx.array, _node: LayersNode) -> mx.array:
        raise NotImplementedError("mlx-lm's classes attend by themselves")

    def advance(self) -> None:
        for cache, row in zip(self._caches, self.rows, strict=True):
            cache.advance(row.count)

    @property
    def arrays(self) -> list[mx.array]:
        return [array for cache in self._caches for array in cache.arrays]


class MlxLmBackend:
    """Caches of one mlx-lm model.

    make_parts: returns empty mlx-lm caches, one a layer. can_batch: returns whether decode steps may share a pass.
    can_copy: False if a cache's entries belong to that object alone.
    """

    pool = None

    def __init__(
        self,
        options: KVOptions,
        make_parts: Callable[[], list[Any]],
        cost: StepCost,
        can_batch: Callable[[], bool],
        *,
        rolls_back: bool,
        can_copy: bool = True,
    ) -> None:
        self._options = options
        self._make_parts = make_parts
        self._cost = cost
        self._can_batch = can_batch
        self.rolls_back = rolls_back
        self.shares_prefixes = can_copy
        self.copies_to_grow = False
        self._prefixes = PrefixCaches(options.limit, options.spare, can_copy=can_copy)

    def acquire(self, prompt: Sequence[int], _entries: int = 0) -> KVCache:
        return self._prefixes.take(prompt) or self._new_cache()

    def release(self, cache: KVCache, tokens: Sequence[int]) -> None:
        if self._options.keep_prefix or self.shares_prefixes:
            self._prefixes.end(cast(MlxLmCache, cache), tokens, outputs=self._options.keep_prefix)

    def make_passes(self, rows: Sequence[PassRow]) -> list[KVPass]:
        """Return one pass for the leading decode steps, if sharing moves fewer bytes, and one for each other row."""
        steps = next((i for i, row in enumerate(rows) if (row.count, row.phase) != (1, "decode")), len(rows))
        lengths = [row.cache.length for row in rows[:steps]]
        if steps < 2 or not self._can_batch() or not worth_batching(lengths, self._cost.weight_bytes, self._cost.kv):
            steps = 0
        shared: list[KVPass] = [MlxLmPass(rows[:steps])] if steps else []
        return shared + [MlxLmPass([row]) for row in rows[steps:]]

    def on_prefill(self, cache: KVCache, tokens: Sequence[int]) -> None:
        if cache.needs_marks:
            cache.mark()
        self._prefixes.add_running(cast(MlxLmCache, cache), tokens)

    def evict(self) -> None:
        self._prefixes.evict()

    def trim(self) -> None:
        if not self._options.keep_prefix:
            self._prefixes.clear()

    def store(self, tokens: Sequence[int], store: DiskStore, stop: Callable[[], bool]) -> None:
        for prefix in self._prefixes:
            if prefix.tokens == list(tokens[: len(prefix.tokens)]) and not stop():
                store_cache(prefix.cache, prefix.tokens, self._options.key, store)

    def load(self, prompt: Sequence[int], store: DiskStore) -> None:
        if self.shares_prefixes and not self._prefixes.has(prompt):
            cache = self._new_cache()
            if tokens := load_cache(cache, prompt, self._options.key, store):
                self._prefixes.end(cache, tokens, outputs=True)

    def _new_cache(self) -> MlxLmCache:
        return MlxLmCache(self._make_parts(), self._options.limit, self._cost.kv)

    def clear(self) -> None:
        self._prefixes.clear()
