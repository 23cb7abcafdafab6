"""The caches of several sequences as one cache, for one pass that reads the weights once for all of them.

A pass (1, N) has the tokens of the first sequence in front, then the second's, and so on. Everything but attention sees
N rows; attention goes sequence by sequence, each over its own entries, exactly as it would alone.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import mlx.core as mx

from headrace.runtime.ops import AttentionSpec, LayersNode, Phase, Projections


class JoinedCache:
    """A `Cache` and `LayerCache` of one pass. caches[i] gets the next tokens, as many and of the phase rows[i] says."""

    runs_fused = False

    def __init__(self, caches: Sequence[Any], rows: Sequence[tuple[int, Phase]]) -> None:
        self._caches = caches
        self._rows = rows
        self._ends = list(accumulate(count for count, _ in rows))

    def reserve(self, tokens: int, _phase: Phase = "prefill") -> None:
        assert tokens == self._ends[-1]
        for cache, (count, phase) in zip(self._caches, self._rows, strict=True):
            cache.reserve(count, phase)

    def advance(self, tokens: int) -> None:
        assert tokens == self._ends[-1]
        for cache, (count, _) in zip(self._caches, self._rows, strict=True):
            cache.advance(count)

    def attend(self, layer: int, qkv: Projections, spec: AttentionSpec) -> mx.array:
        """qkv (1, N, (H + 2 Hkv) * D) or its parts -> (1, N, H * D)."""
        cut = self._ends[:-1]
        if isinstance(qkv, mx.array):
            rows: list[Projections] = list(mx.split(qkv, cut, axis=1))
        else:
            rows = [list(part) for part in zip(*(mx.split(part, cut, axis=1) for part in qkv), strict=True)]
        heads = [cache.attend(layer, own, spec) for cache, own in zip(self._caches, rows, strict=True)]
        return mx.concatenate(heads, axis=1)

    def run_fused(self, layers: slice, x: mx.array, node: LayersNode) -> mx.array:
        raise NotImplementedError("layers of joined caches come one by one")

    @property
    def arrays(self) -> list[mx.array]:
        return [array for cache in self._caches for array in cache.arrays]
