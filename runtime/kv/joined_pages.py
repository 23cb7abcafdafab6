"""The paged caches of several sequences as one cache, for one pass through whole layers at once.

As `runtime.kv.joined_cache`, but attention too is of all rows: the operations read through each sequence's tables.
"""

from collections.abc import Sequence

import mlx.core as mx

from headrace.runtime.kv.paged_cache import PagedCache, PagedPass
from headrace.runtime.ops import AttentionSpec, LayersNode, Phase, Projections


class JoinedPages:
    """A `Cache` and `LayerCache` of one pass. caches[i] gets the next tokens, as many and of the phase rows[i] says."""

    runs_fused = True

    def __init__(self, caches: Sequence[PagedCache], rows: Sequence[tuple[int, Phase]]) -> None:
        self._caches = caches
        self._rows = rows

    def reserve(self, _tokens: int, _phase: Phase = "prefill") -> None:
        for cache, (count, phase) in zip(self._caches, self._rows, strict=True):
            cache.reserve(count, phase)
        held = [cache.rows(count) for cache, (count, _) in zip(self._caches, self._rows, strict=True)]
        self._pass = PagedPass(self._caches[0].slabs, held)

    def advance(self, _tokens: int) -> None:
        for cache, (count, _) in zip(self._caches, self._rows, strict=True):
            cache.advance(count)

    def attend(self, layer: int, qkv: Projections, spec: AttentionSpec) -> mx.array:
        return self._pass.attend(layer, qkv, spec)

    def run_fused(self, layers: slice, x: mx.array, node: LayersNode) -> mx.array:
        return self._pass.run_fused(layers, x, node)

    @property
    def arrays(self) -> list[mx.array]:
        return self._caches[0].arrays
