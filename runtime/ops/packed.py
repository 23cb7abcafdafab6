"""Attention over packed K/V in stock MLX, which quantizes in groups with a scale and an offset each.

Contract: as `runtime.ops.reference.attend`, over `Rows` instead of plain buffers. What costs less is done: few queries
multiply the codes as they are; for more, which MLX's attention takes in one kernel, one layer's visible entries are
unpacked, and forgotten behind it. Keys or values that are not finite come out as NaN.
B = batch, T = new tokens, S = entries that are seen, H and Hkv = query and key-value heads, D = head size.
"""

from typing import NamedTuple

import mlx.core as mx

from headrace.runtime.ops import reference
from headrace.runtime.ops.kv_format import Coding, KVFormat
from headrace.runtime.ops.weights import AttentionSpec, Projections

FEW = 64
"""Queries of a K/V head that multiply codes; more are worth unpacking for. Over 4,096 entries, in float32 on a CPU, 3
take a quarter of the time that way, 192 the same; in half precision, which MLX emulates there, 5 times as much."""


class Rows(NamedTuple):
    """Keys or values of one layer, each (B, Hkv, capacity, ...): codes in dwords, and what each group of D shares."""

    codes: mx.array
    scales: mx.array
    offsets: mx.array


def attend(
    qkv: Projections, keys: Rows, values: Rows, offset: int, spec: AttentionSpec, first: int, kv: KVFormat
) -> tuple[mx.array, Rows, Rows]:
    """Rotate, pack, append and attend: (out (B, T, H * D), keys, values), as `reference.attend` gives them."""
    q, k, v = reference.split_heads(qkv, spec)
    batch, _, length, _ = q.shape
    row = offset - first
    end = row + length
    keys = _written(keys, reference.place(k, spec.k_norm, offset, spec), row, kv.keys)
    values = _written(values, v, row, kv.values)
    q = reference.place(q, spec.q_norm, offset, spec)
    start = 0 if spec.window is None else max(0, row - spec.window + 1)
    seen_keys, seen_values = (Rows(*(part[:, :, start:end] for part in rows)) for rows in (keys, values))
    if length * (spec.heads // spec.kv_heads) <= FEW and (q.dtype == mx.float32 or reference.on_gpu()):
        out = _over_codes(q, seen_keys, seen_values, spec, kv)
    else:
        plain_keys = _unpacked(seen_keys, kv.keys, q.dtype)
        out = reference.attended(q, plain_keys, _unpacked(seen_values, kv.values, q.dtype), spec)
    return out.transpose(0, 2, 1, 3).reshape(batch, length, -1), keys, values


def pack(x: mx.array, coding: Coding, dtype: mx.Dtype) -> Rows:
    """x (..., D) as codes; scales and offsets in `dtype`."""
    codes, scales, offsets = mx.quantize(x.astype(dtype), group_size=coding.group, bits=coding.bits)
    # Comparing finds no extremes in what is no number: without this it would come back as one.
    spoiled = (0 * x).reshape(*scales.shape, coding.group).sum(axis=-1)
    return Rows(codes, scales + spoiled.astype(dtype), offsets)


def _written(rows: Rows, new: mx.array, at: int, coding: Coding) -> Rows:
    """With `new` (B, Hkv, T, D) from row `at` on."""
    for part, packed in zip(rows, pack(new, coding, rows.scales.dtype), strict=True):
        part[:, :, at : at + new.shape[2]] = packed
    return rows


def _unpacked(rows: Rows, coding: Coding, dtype: mx.Dtype) -> mx.array:
    """(..., D) in `dtype`."""
    plain = mx.dequantize(
        rows.codes, scales=rows.scales, biases=rows.offsets, group_size=coding.group, bits=coding.bits
    )
    return plain.astype(dtype)


def _product(x: mx.array, rows: Rows, coding: Coding, *, transpose: bool) -> mx.array:
    """x (B, Hkv, n, D or S) times the rows (B, Hkv, S, D), transposed or not."""
    scales, offsets = (part.astype(x.dtype) for part in (rows.scales, rows.offsets))
    return mx.quantized_matmul(
        x,
        rows.codes,
        scales=scales,
        biases=offsets,
        transpose=transpose,
        group_size=coding.group,
        bits=coding.bits,
    )


def _over_codes(q: mx.array, keys: Rows, values: Rows, spec: AttentionSpec, kv: KVFormat) -> mx.array:
    """q (B, H, T, D) -> (B, H, T, D)."""
    batch, heads, length, dim = q.shape
    shared, entries = heads // spec.kv_heads, keys.codes.shape[2]
    grouped = (q * spec.scale).reshape(batch, spec.kv_heads, shared * length, dim)
    scores = _product(grouped, keys, kv.keys, transpose=True)
    scores = scores.reshape(batch, spec.kv_heads, shared, length, entries)
    if spec.softcap is not None:
        scores = mx.tanh(scores / spec.softcap) * spec.softcap
    scores = reference.hidden(scores, reference.mask(length, entries, spec.window))
    if spec.sinks is not None:
        sinks = spec.sinks.astype(scores.dtype).reshape(1, spec.kv_heads, shared, 1, 1)
        scores = mx.concatenate([scores, mx.broadcast_to(sinks, (*scores.shape[:-1], 1))], axis=-1)
    weights = mx.softmax(scores, axis=-1, precise=True)[..., :entries]
    weights = weights.reshape(batch, spec.kv_heads, shared * length, entries)
    return _product(weights, values, kv.values, transpose=False).reshape(batch, heads, length, dim)
