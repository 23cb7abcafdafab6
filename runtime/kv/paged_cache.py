"""A sequence's K/V in blocks of a pool that many share: what the engine and the layers need of a cache.

Contract: `Cache` and `LayerCache` of `runtime.kv.cache`; `close` gives a sequence's blocks back. `PagedPass` is the
layers' side alone, for the rows of several sequences. What a sequence's tokens are, only the engine knows: it says so
by `publish`, and begins with what others left by `resume` (`runtime.kv.tables`).
E = model width, N = rows of a pass.
"""

from collections.abc import Sequence
from typing import TypeVar, cast

import mlx.core as mx

from headrace.runtime.kv.cache import KVShape
from headrace.runtime.kv.pool import BlockPool
from headrace.runtime.kv.slabs import Slabs
from headrace.runtime.kv.tables import Tables
from headrace.runtime.metrics.cost import BESIDE_WINDOW
from headrace.runtime.ops import BLOCK, AttentionSpec, LayersNode, Ops, Pass, Phase, Projections, SequenceRows

_Projected = TypeVar("_Projected", mx.array, Projections)


class PagedPass:
    """The rows of one pass through the layers, of as many sequences as `rows` has, in that order."""

    runs_fused = True

    def __init__(self, slabs: Slabs, rows: Sequence[SequenceRows]) -> None:
        self._slabs = slabs
        self._pass = Pass(rows, slabs.store)
        self._before = slabs.newest

    def attend(self, layer: int, qkv: Projections, spec: AttentionSpec) -> mx.array:
        """qkv (1, N, (H + 2 Hkv) * D) or its parts -> (1, N, H * D)."""
        out = self._slabs.ops.attend_pass(self._in_turn(qkv), self._pass, layer, spec)
        self._slabs.newest = out
        return out

    def run_fused(self, layers: slice, x: mx.array, node: LayersNode) -> mx.array:
        """x (1, N, E) -> (1, N, E)."""
        x = node.run_pass(self._in_turn(x), self._pass, layers)
        self._slabs.newest = x
        return x

    def _in_turn(self, x: _Projected) -> _Projected:
        """`x`, not to be had before the pass before has appended: slabs written in place do not say so themselves."""
        if self._before is None:
            return x
        before, self._before = self._before, None
        return cast(_Projected, mx.depends(x, before))


class PagedCache(Tables):
    """One sequence."""

    runs_fused = True

    def __init__(self, pool: BlockPool, slabs: Slabs, limit: int) -> None:
        super().__init__(pool, slabs, limit)
        self.slabs = slabs
        self._pass: PagedPass | None = None

    def attend(self, layer: int, qkv: Projections, spec: AttentionSpec) -> mx.array:
        tokens = (qkv if isinstance(qkv, mx.array) else qkv[0]).shape[1]
        return self._current(tokens).attend(layer, qkv, spec)

    def run_fused(self, layers: slice, x: mx.array, node: LayersNode) -> mx.array:
        return self._current(x.shape[1]).run_fused(layers, x, node)

    def rows(self, count: int) -> SequenceRows:
        """What the next pass has of this sequence: `count` tokens, for which there is room."""
        return SequenceRows(count, self.length, self._phase, self.tables)

    def reserve(self, tokens: int, phase: Phase = "prefill") -> None:
        super().reserve(tokens, phase)
        self._pass = None

    @property
    def committed_bytes(self) -> int:
        rows = 0
        for group, left in zip(self.slabs.store.groups, self.left, strict=True):
            rows += len(group.layers) * max(0, self.committed - left * BLOCK)
        return rows * self.slabs.shape.row_bytes

    @property
    def allocated_bytes(self) -> int:
        """Of the blocks it holds, those that it shares too."""
        held = 0
        for group, (table, left) in enumerate(zip(self.tables, self.left, strict=True)):
            held += self.slabs.block_bytes(group) * (len(table) - left)
        return held

    @property
    def arrays(self) -> list[mx.array]:
        return self.slabs.arrays

    def _current(self, tokens: int) -> PagedPass:
        if self._pass is None:
            self._pass = PagedPass(self.slabs, [self.rows(tokens)])
        return self._pass


class KVPool:
    """Blocks and their arrays, for sequences that hold at most `entries` together; `key` as in `BlockPool`.

    kept: what nobody holds is remembered while there are no more blocks than a sequence of so many entries takes (in
    a layer group with a window, two that end there). None: while there is room.
    """

    def __init__(self, shape: KVShape, ops: Ops, entries: int, key: bytes = b"", kept: int | None = None) -> None:
        self.slabs = self._make_slabs(shape, ops)
        windows = self.slabs.windows
        most = -(-entries // BLOCK)
        spans = [2 * (window + BESIDE_WINDOW) if window else entries for window in windows]
        bounds = [-(-min(span, kept or entries) // BLOCK) + 1 for span in spans]
        self.blocks = BlockPool(windows, [most] * len(windows), self.slabs.set_aside, key, bounds if kept else None)

    def _make_slabs(self, shape: KVShape, ops: Ops) -> Slabs:
        return Slabs(shape, ops)

    def make_cache(self, limit: int) -> PagedCache:
        """An empty cache for one sequence of at most `limit` tokens."""
        return PagedCache(self.blocks, self.slabs, limit)

    def clear(self) -> None:
        """Forget what nobody holds, and give its memory back."""
        self.blocks.clear()
        self.give_back()

    def give_back(self) -> None:
        """Give back the memory in which nothing is held or remembered."""
        self.slabs.give_back(self.blocks)
