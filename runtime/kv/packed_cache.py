"""`KVCache` over packed K/V, for stock MLX operations: buffers of codes, scales and offsets instead of one.

Contract: that of `runtime.kv.cache`. The kernels read packed K/V from blocks of a pool instead (`runtime.kv`).
"""

import mlx.core as mx

from headrace.runtime.kv.cache import KVCache, KVShape
from headrace.runtime.ops import AttentionSpec, Ops, Projections
from headrace.runtime.ops.kv_format import Coding
from headrace.runtime.ops.packed import Rows, attend


class PackedCache(KVCache):
    """The rows of a layer's keys, and of its values, are three arrays."""

    runs_fused = False

    def __init__(self, shape: KVShape, *, limit: int, ops: Ops, dtype: mx.Dtype) -> None:
        """dtype: of the scales; half precision, in which a format's bytes are counted."""
        super().__init__(shape, limit=limit, ops=ops)
        kv = shape.format
        self._rows = [(_no_rows(shape, kv.keys, dtype), _no_rows(shape, kv.values, dtype)) for _ in range(shape.layers)]

    def attend(self, layer: int, qkv: Projections, spec: AttentionSpec) -> mx.array:
        out, *rows = attend(
            self._in_turn(qkv), *self._rows[layer], self.length, spec, self.firsts[layer], self._shape.format
        )
        self._rows[layer] = (rows[0], rows[1])
        self._newest = out
        return out

    def _move(self, layer: int, kept: slice, capacity: int) -> None:
        keys, values = (
            Rows(*(self._ops.grow(part[:, :, kept], capacity) for part in rows)) for rows in self._rows[layer]
        )
        self._rows[layer] = (keys, values)
        mx.eval(keys, values)
        mx.clear_cache()

    @property
    def _held(self) -> list[mx.array]:
        return [part for pair in self._rows for rows in pair for part in rows]


def _no_rows(shape: KVShape, coding: Coding, dtype: mx.Dtype) -> Rows:
    def empty(width: int, dtype: mx.Dtype) -> mx.array:
        return mx.zeros((1, shape.kv_heads, 0, width), dtype)

    groups = shape.head_dim // coding.group
    return Rows(empty(shape.head_dim * coding.bits // 32, mx.uint32), empty(groups, dtype), empty(groups, dtype))
