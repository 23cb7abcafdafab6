"""Batched attention in stock MLX over K/V slots of shared buffers, one slot per sequence.

Contract: a row's result equals that of `reference.attend` alone, except for the order of additions. Each sequence has
one new token; entries of a slot after its sequence's length, or before its window, are masked.

`BufferPass` (`runtime.kv.buffers`) uses it for sequences that decode in shared buffers. `SlotRows` is made once for the
layers of a kind, as its arrays are the same in all of them. tests/runtime/kv/test_buffers.py compares.
N = rows, S = slots read, up to the highest one used; slots without a row are read but ignored.
"""

from collections.abc import Sequence

import mlx.core as mx

from headrace.runtime.ops.attention import placed_heads
from headrace.runtime.ops.weights import AttentionSpec, Projections


class SlotRows:
    """Slots, write positions and mask of a pass's rows, in layers of one window.

    Row i is the token at position offsets[i] of the sequence in slots[i]; its buffer starts at position firsts[i].
    """

    def __init__(self, slots: list[int], offsets: list[int], firsts: list[int], spec: AttentionSpec) -> None:
        positions = [offset - first for offset, first in zip(offsets, firsts, strict=True)]
        begins = [max(0, spec.first_seen(offset) - first) for offset, first in zip(offsets, firsts, strict=True)]
        self.read = max(slots) + 1  # S
        self.begin = min(begins)  # first row of the buffer that any sequence sees
        self.end = max(positions) + 1  # row after the last that any sequence writes
        self.position = positions[0] if _all_equal(positions) else None  # that all rows write to; None if they differ
        self.offset = offsets[0] if _all_equal(offsets) else mx.array(offsets, mx.int32)
        self.in_order = slots == list(range(self.read))
        # All indices have the type of MLX's own: else each layer casts them.
        self.slots = mx.array(slots, mx.uint32)
        self.positions = mx.array(positions, mx.uint32)
        # Attention reads slots 0 to S - 1, so queries are gathered by slot, and outputs by row.
        rows = [0] * self.read  # by slot; any row for a slot without one
        for row, slot in enumerate(slots):
            rows[slot] = row
        self.rows = mx.array(rows, mx.uint32)
        # An array mask disables MLX's fused attention on CUDA; on Metal, vector attention skips masked keys. No mask is
        # needed for sequences of equal length.
        self._visible: mx.array | None = None  # (S, end - begin)
        if self.position is None or not _all_equal(begins):
            entries = mx.arange(self.begin, self.end, dtype=mx.uint32)
            first = mx.array(begins, mx.uint32)[self.rows, None]
            last = self.positions[self.rows, None]
            self._visible = (entries >= first) & (entries <= last)
        self._masks: dict[int, mx.array] = {}  # by number of query heads
        self._heads: dict[int, mx.array] = {}

    def mask(self, heads: int) -> mx.array | None:
        """Return the mask (S, H, 1, end - begin), contiguous: MLX copies others in every layer."""
        if self._visible is None:
            return None
        if heads not in self._masks:
            slots, entries = self._visible.shape
            whole = mx.broadcast_to(self._visible[:, None, None], (slots, heads, 1, entries))
            self._masks[heads] = mx.contiguous(whole)  # a copy for each head count, not for each layer
        return self._masks[heads]

    def heads(self, count: int) -> mx.array:
        """Return the indices of K/V heads, (Hkv,)."""
        if count not in self._heads:
            self._heads[count] = mx.array(list(range(count)), mx.uint32)
        return self._heads[count]


def _all_equal(values: Sequence[int]) -> bool:
    return len(set(values)) == 1


def attend_slots(
    qkv: Projections, keys: mx.array, values: mx.array, rows: SlotRows, spec: AttentionSpec
) -> tuple[mx.array, mx.array, mx.array]:
    """Rotate, append each row's K/V to its slot, and attend over the slot's entries.

    qkv: projections of (1, N) tokens; keys, values (slots, Hkv, capacity, D) -> (out (1, N, H * D), keys,
    values). Use only the returned buffers afterwards.
    """
    apart = [projected.swapaxes(0, 1) for projected in qkv]  # (N, 1, ...): each token as a sequence
    q, k, v = placed_heads(apart, rows.offset, spec)  # (N, H or Hkv, 1, D)
    if k is not None and v is not None:
        k = k.astype(keys.dtype)
        v = v.astype(values.dtype)
        # One slice, where all rows write the same position; else an index (slot, head, position) for each row.
        if rows.in_order and rows.position is not None:
            keys[: rows.read, :, rows.position : rows.position + 1] = k
            values[: rows.read, :, rows.position : rows.position + 1] = v
        else:
            positions = rows.slots[:, None], rows.heads(spec.kv_heads), rows.positions[:, None]
            keys[positions] = k[:, :, 0]
            values[positions] = v[:, :, 0]
    seen_keys = keys[: rows.read, :, rows.begin : rows.end].astype(q.dtype)
    seen_values = values[: rows.read, :, rows.begin : rows.end].astype(q.dtype)
    if not rows.in_order:
        q = q[rows.rows]  # (S, H, 1, D), by slot
    out = mx.fast.scaled_dot_product_attention(
        q,
        seen_keys,
        seen_values,
        scale=spec.scale,
        mask=rows.mask(spec.heads),
        sinks=spec.sinks,
    )  # (S, H, 1, D)
    if not rows.in_order:
        out = out[rows.slots]  # (N, H, 1, D)
    return out.reshape(1, len(rows.slots), -1), keys, values
