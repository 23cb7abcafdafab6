"""Integers of 2, 4 or 8 bits packed into 32-bit words: GPTQ, AWQ and compressed-tensors, as unsigned values and zeros.

All three are W = scale * (q - zero) with a scale and a zero point per group of a row, which is what MLX's affine groups
hold: W = scale * q + bias with bias = -scale * zero, exact in float32.
"""

import mlx.core as mx

from headrace.models.checkpoint.foreign.formats import ForeignMatrix
from headrace.runtime.errors import CheckpointError

# AWQ puts value i of eight neighbours into nibble _AWQ_NIBBLES[i] of their word.
_AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)


def unpack(
    matrix: ForeignMatrix, data: mx.array, scales: mx.array, zeros: mx.array | None, zeros_less_one: bool
) -> tuple[mx.array, mx.array, mx.array]:
    """(q (N, K) uint32, scales (N, G) float32, zeros (N, G) float32), groups in the order the file has them."""
    bits = matrix.stored_bits
    if matrix.layout == "packed":
        q, step = _open(data, bits), scales.astype(mx.float32)
        half = 1 << (bits - 1)
        if zeros is None:
            return q, step, mx.full(step.shape, float(half))
        zero = _open(zeros.T, bits)[:, : matrix.shape[0]].T  # packed along the rows of W, the last word padded
        return q, step, zero.astype(mx.float32)
    assert zeros is not None
    step = scales.astype(mx.float32).T
    if matrix.layout == "awq":  # W.T (K, N) packed along N
        return _open(data, bits, _AWQ_NIBBLES).T, step, _open(zeros, bits, _AWQ_NIBBLES).T.astype(mx.float32)
    zero = _open(zeros, bits)
    if zeros_less_one:
        zero = (zero + 1) & ((1 << bits) - 1)
    return _open(data.T, bits), step, zero.T.astype(mx.float32)  # W.T (K, N) packed along K


def affine(
    matrix: ForeignMatrix, q: mx.array, scales: mx.array, zeros: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    """MLX's packed words, scales and biases of values whose groups MLX has."""
    rows, columns = matrix.shape
    bits, times = matrix.stored_bits, matrix.stored_group // matrix.group_size
    per_word = 32 // bits
    shifts = mx.arange(per_word, dtype=mx.uint32) * bits
    words = (q.reshape(rows, columns // per_word, per_word) << shifts).sum(axis=-1).astype(mx.uint32)
    step, bias = scales, -zeros * scales
    if times > 1:
        step, bias = mx.repeat(step, times, axis=1), mx.repeat(bias, times, axis=1)
    return words, mx.contiguous(step), mx.contiguous(bias)


def dequantize(
    matrix: ForeignMatrix, q: mx.array, scales: mx.array, zeros: mx.array, order: mx.array | None
) -> mx.array:
    """float32 (N, K). `order` (K,): the group of each column, where columns were not grouped as neighbours."""
    group = (mx.arange(matrix.shape[1]) // matrix.stored_group) if order is None else order.astype(mx.int32)
    return (q.astype(mx.float32) - zeros[:, group]) * scales[:, group]


def check_order(matrix: ForeignMatrix, order: mx.array) -> None:
    """Raises CheckpointError for a group that is not there, and for neighbours apart that were said to be together."""
    count = matrix.shape[1] // matrix.stored_group
    if mx.any((order < 0) | (order >= count)).item():
        raise CheckpointError(f"{matrix.parts['order']} names a group that {matrix.parts['data']} does not have")
    if matrix.exact and mx.any(order != mx.arange(matrix.shape[1]) // matrix.stored_group).item():
        raise CheckpointError(f"{matrix.parts['order']} orders columns by activation; config.json says otherwise")


def _open(words: mx.array, bits: int, nibbles: tuple[int, ...] | None = None) -> mx.array:
    """(R, C) words -> (R, C * 32 / bits) values, the lowest bits first unless `nibbles` says where each one is."""
    rows, columns = words.shape
    places = mx.arange(32 // bits, dtype=mx.uint32) if nibbles is None else mx.array(nibbles, dtype=mx.uint32)
    values = (words.view(mx.uint32)[..., None] >> (places * bits)) & ((1 << bits) - 1)
    return values.reshape(rows, columns * (32 // bits))
