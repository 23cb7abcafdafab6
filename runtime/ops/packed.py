"""Attention over packed K/V in stock MLX, in MLX's groups with a scale and an offset.

Contract: as `runtime.ops.reference.attend`, over `PackedRows` instead of plain buffers. Few queries multiply the codes
directly, on a Mac in one kernel (`runtime.ops.metal_attention`); for more, one layer's visible entries are unpacked for
MLX's fused attention. Codes are those of the heads' Hadamard transforms (`transformed`). On a CPU, non-finite keys or
values come back as NaN; on a GPU the check of logits alone finds them, since it would take six kernels a layer.
`SlotCache.attend` is the only caller. tests/runtime/kv/test_packed_cache.py bounds the error on every way through.
B = batch, T = new tokens, S = visible entries, H and Hkv = query and key-value heads, D = head size.
"""

from typing import NamedTuple

import mlx.core as mx

from headrace.runtime.ops import metal_attention, reference
from headrace.runtime.ops.attention import (
    apply_mask,
    attention,
    placed_heads,
    sdpa_mask,
)
from headrace.runtime.ops.kv_format import Coding, KVFormat
from headrace.runtime.ops.weights import AttentionSpec, Projections

MAX_DIRECT = 64
"""Queries per K/V head up to which codes are multiplied directly (docs/kv.md)."""


class PackedRows(NamedTuple):
    """Keys or values of one layer, each (B, Hkv, capacity, ...): codes in dwords, and each group's scale and offset."""

    codes: mx.array
    scales: mx.array
    offsets: mx.array

    def entries(self, first: int, end: int) -> "PackedRows":
        """Return the rows [first, end) of all parts."""
        return PackedRows(*(part[:, :, first:end] for part in self))


def attend(
    qkv: Projections, keys: PackedRows, values: PackedRows, offset: int, spec: AttentionSpec, first: int, kv: KVFormat
) -> tuple[mx.array, PackedRows, PackedRows]:
    """Rotate, pack, append and attend. Returns (out (B, T, H * D), keys, values), as `reference.attend` does."""
    q, k, v = placed_heads(qkv, offset, spec)
    batch, _, length, _ = q.shape
    row = offset - first
    end = row + length
    # Both sides of a product are transformed, and the transform is orthogonal: q . k is unchanged, and so is the sum of
    # values once the output is transformed back.
    q = transformed(q)
    if k is not None and v is not None:
        keys = _written(keys, transformed(k), row, kv.keys)
        values = _written(values, transformed(v), row, kv.values)
    start = max(0, spec.first_seen(offset) - first)
    seen_keys = keys.entries(start, end)
    seen_values = values.entries(start, end)
    if not spec.chunked and metal_attention.attends(q, spec):
        out = metal_attention.attend(q, seen_keys, seen_values, spec, kv)
    elif length * (spec.heads // spec.kv_heads) <= MAX_DIRECT and (q.dtype == mx.float32 or reference.on_gpu()):
        out = over_codes(q, seen_keys, seen_values, spec, kv, first + start)
    else:
        plain_keys = _unpacked(seen_keys, kv.keys, q.dtype)
        plain_values = _unpacked(seen_values, kv.values, q.dtype)
        out = attention(q, plain_keys, plain_values, spec, first + start)
    return transformed(out).transpose(0, 2, 1, 3).reshape(batch, length, -1), keys, values


def transformed(heads: mx.array) -> mx.array:
    """Return the Hadamard transform of heads (..., D), its own inverse, in parts of the largest power of two in D.

    No channel of it is far larger than the others, so groups lose less. Transformed queries and keys have the same
    scores as before.
    """
    dim = heads.shape[-1]
    part = dim & -dim  # the lowest bit that is set: 128 of 128, 32 of 96
    wide = heads
    if not reference.on_gpu():  # MLX's CPU kernel rounds every stage
        wide = heads.astype(mx.float32)
    out = mx.hadamard_transform(wide.reshape(*heads.shape[:-1], dim // part, part))
    return out.reshape(heads.shape).astype(heads.dtype)


def pack(x: mx.array, coding: Coding, dtype: mx.Dtype) -> PackedRows:
    """Quantize x (..., D); scales and offsets in `dtype`."""
    codes, scales, offsets = mx.quantize(x.astype(dtype), group_size=coding.group, bits=coding.bits)
    if reference.on_gpu():
        return PackedRows(codes, scales, offsets)
    # Minimum and maximum skip NaN, so a group with one would come back finite.
    # 0 * NaN and 0 * inf are NaN: added to the offset, the whole group comes back as NaN.
    nans = (0 * x).reshape(*scales.shape, coding.group).sum(axis=-1)
    return PackedRows(codes, scales + nans.astype(dtype), offsets)


def _written(rows: PackedRows, new: mx.array, at: int, coding: Coding) -> PackedRows:
    """Return the rows with `new` (B, Hkv, T, D), packed by `coding`, from row `at` on."""
    for part, packed in zip(rows, pack(new, coding, rows.scales.dtype), strict=True):
        part[:, :, at : at + new.shape[2]] = packed
    return rows


def _unpacked(rows: PackedRows, coding: Coding, dtype: mx.Dtype) -> mx.array:
    """Dequantize to (..., D) in `dtype`."""
    plain = mx.dequantize(
        rows.codes, scales=rows.scales, biases=rows.offsets, group_size=coding.group, bits=coding.bits
    )
    return plain.astype(dtype)


def _product(x: mx.array, rows: PackedRows, coding: Coding, *, transpose: bool) -> mx.array:
    """Multiply x (B, Hkv, n, D or S) by the rows (B, Hkv, S, D), transposed or not.

    On a GPU each of the n is a product by itself: MLX's kernels for one row are split over the entries, those for
    several rows walk all of them in few threadgroups.
    """
    codes = rows.codes
    scales = rows.scales.astype(x.dtype)
    offsets = rows.offsets.astype(x.dtype)
    if reference.on_gpu() and x.ndim == 4:
        apart = PackedRows(*(part[:, :, None] for part in (codes, scales, offsets)))
        return _product(x[:, :, :, None], apart, coding, transpose=transpose)[..., 0, :]
    return mx.quantized_matmul(
        x,
        codes,
        scales=scales,
        biases=offsets,
        transpose=transpose,
        group_size=coding.group,
        bits=coding.bits,
    )


def over_codes(
    q: mx.array, keys: PackedRows, values: PackedRows, spec: AttentionSpec, kv: KVFormat, begin: int = 0
) -> mx.array:
    """Attend without unpacking. q (B, H, T, D) -> (B, H, T, D). begin: position of the first key."""
    batch, heads, length, dim = q.shape
    shared = heads // spec.kv_heads
    entries = keys.codes.shape[2]
    # The query heads of a K/V head are rows of one product with its codes.
    grouped = (q * spec.scale).reshape(batch, spec.kv_heads, shared * length, dim)
    scores = _product(grouped, keys, kv.keys, transpose=True)
    scores = scores.reshape(batch, spec.kv_heads, shared, length, entries)
    if spec.softcap is not None:
        scores = mx.tanh(scores / spec.softcap) * spec.softcap
    scores = apply_mask(scores, sdpa_mask(length, entries, spec, begin))
    if spec.sinks is not None:
        # One more column of the softmax, which takes a part of the weight and has no value.
        sinks = spec.sinks.astype(scores.dtype).reshape(1, spec.kv_heads, shared, 1, 1)
        scores = mx.concatenate([scores, mx.broadcast_to(sinks, (*scores.shape[:-1], 1))], axis=-1)
    weights = mx.softmax(scores, axis=-1, precise=True)[..., :entries]
    weights = weights.reshape(batch, spec.kv_heads, shared * length, entries)
    return _product(weights, values, kv.values, transpose=False).reshape(batch, heads, length, dim)
