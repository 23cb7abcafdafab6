"""K/V backend of mlx-lm's caches: one list of mlx-lm's own caches per sequence."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import mlx.core as mx

from headrace.models.mlx_lm.cache import MlxLmCache
from headrace.models.mlx_lm.disk import load_cache, store_cache
from headrace.models.mlx_lm.prefixes import PrefixCaches
from headrace.runtime.kv.backend import KVOptions
from headrace.runtime.kv.cache import KVCache, KVPass, PassRow
from headrace.runtime.kv.disk import DiskStore
from headrace.runtime.metrics.cost import StepCost
from headrace.runtime.ops import AttentionSpec, LayersNode, MixerSpec, Projections


class MlxLmPass:
    """One row. The model gets `parts`; its layers append and attend."""

    runs_fused = False

    def __init__(self, rows: Sequence[PassRow]) -> None:
        self.rows = rows
        [row] = rows
        self._cache = cast(MlxLmCache, row.cache)
        if self._cache.needs_marks and row.phase == "decode" and row.count > 1:
            self._cache.hold()
        self.parts: Sequence[Any] = self._cache.parts

    def attend(self, _layer: int, _qkv: Projections, _spec: AttentionSpec) -> mx.array:
        raise NotImplementedError("mlx-lm's classes attend by themselves")

    def mix(self, _layer: int, _x: mx.array, _spec: MixerSpec) -> mx.array:
        raise NotImplementedError("mlx-lm's classes keep their recurrent state by themselves")

    def run_fused(self, _layers: slice, _x: mx.array, _node: LayersNode) -> mx.array:
        raise NotImplementedError("mlx-lm's classes attend by themselves")

    def advance(self) -> None:
        self._cache.advance(self.rows[0].count)

    @property
    def arrays(self) -> list[mx.array]:
        return self._cache.arrays


class MlxLmBackend:
    """Caches of one mlx-lm model.

    Each row is a pass of its own: mlx-lm's caches are those of one sequence. make_parts: returns empty ones, one a
    layer. can_copy: False if a cache's entries belong to that object alone.
    """

    pool = None

    def __init__(
        self,
        options: KVOptions,
        make_parts: Callable[[], list[Any]],
        cost: StepCost,
        *,
        rolls_back: bool,
        can_copy: bool = True,
    ) -> None:
        self._options = options
        self._make_parts = make_parts
        self._cost = cost
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
        return [MlxLmPass([row]) for row in rows]

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
