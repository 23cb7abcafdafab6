"""Unpacking of integers of 2, 4 or 8 bits in 32-bit words: GPTQ, AWQ and compressed-tensors.

All three are W = scale * (q - zero) with a scale and a zero point per group of a row. MLX's affine groups represent
them exactly in float32: W = scale * q + bias with bias = -scale * zero.

Dimensions: W (N, K) with G groups in a row, C words in a row.

Guard: tests/models/checkpoint/test_foreign.py.
"""

import mlx.core as mx

from headrace.models.checkpoint.foreign.matrices import ForeignMatrix
from headrace.runtime.errors import CheckpointError

# Nibble of a word that has value i of eight neighbours, in AWQ.
_AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)


def unpack(
    matrix: ForeignMatrix, data: mx.array, scales: mx.array, zeros: mx.array | None, zeros_less_one: bool
) -> tuple[mx.array, mx.array, mx.array]:
    """Return (q (N, K) uint32, scales (N, G) float32, zeros (N, G) float32), groups in the file's order.

    data, scales, zeros: as stored. zeros_less_one: zero points are stored minus one (`Foreign`).
    """
    bits = matrix.stored_bits
    if matrix.layout == "packed":
        q = _open(data, bits)
        step = scales.astype(mx.float32)
        half = 1 << (bits - 1)  # signed integers are stored with this added
        if zeros is None:
            return q, step, mx.full(step.shape, float(half))
        zero = _open(zeros.T, bits)[:, : matrix.shape[0]].T  # packed along the rows of W, last word padded
        return q, step, zero.astype(mx.float32)
    assert zeros is not None
    step = scales.astype(mx.float32).T
    if matrix.layout == "awq":  # W.T (K, N) packed along N
        return _open(data, bits, _AWQ_NIBBLES).T, step, _open(zeros, bits, _AWQ_NIBBLES).T.astype(mx.float32)
    zero = _open(zeros, bits)
    if zeros_less_one:
        zero = (zero + 1) & ((1 << bits) - 1)  # within `bits`, so that the largest becomes 0
    return _open(data.T, bits), step, zero.T.astype(mx.float32)  # W.T (K, N) packed along K


def affine(
    matrix: ForeignMatrix, q: mx.array, scales: mx.array, zeros: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    """Return MLX's packed words, scales and biases, for groups that MLX supports."""
    rows, columns = matrix.shape
    bits = matrix.stored_bits
    times = matrix.stored_group // matrix.group_size  # MLX's groups in a stored one, which have its scale
    per_word = 32 // bits
    shifts = mx.arange(per_word, dtype=mx.uint32) * bits
    words = (q.reshape(rows, columns // per_word, per_word) << shifts).sum(axis=-1).astype(mx.uint32)
    step = scales
    bias = -zeros * scales
    if times > 1:
        step = mx.repeat(step, times, axis=1)
        bias = mx.repeat(bias, times, axis=1)
    return words, mx.contiguous(step), mx.contiguous(bias)


def dequantize(
    matrix: ForeignMatrix, q: mx.array, scales: mx.array, zeros: mx.array, order: mx.array | None
) -> mx.array:
    """Return float32 (N, K). order (K,): the group of each column, if groups are not neighbouring columns."""
    group = (mx.arange(matrix.shape[1]) // matrix.stored_group) if order is None else order.astype(mx.int32)
    return (q.astype(mx.float32) - zeros[:, group]) * scales[:, group]


def check_order(matrix: ForeignMatrix, order: mx.array) -> None:
    """Raise CheckpointError for a group out of range, and for an order that contradicts config.json."""
    count = matrix.shape[1] // matrix.stored_group
    if mx.any((order < 0) | (order >= count)).item():
        raise CheckpointError(f"{matrix.parts['order']} names a group that {matrix.parts['data']} does not have")
    if matrix.exact and mx.any(order != mx.arange(matrix.shape[1]) // matrix.stored_group).item():
        raise CheckpointError(
            f"{matrix.parts['order']} orders columns by activation, which config.json does not declare"
        )


def _open(words: mx.array, bits: int, nibbles: tuple[int, ...] | None = None) -> mx.array:
    """Unpack words (R, C) to values (R, C * 32 / bits), lowest bits first unless `nibbles` gives their places."""
    rows, columns = words.shape
    positions = mx.arange(32 // bits, dtype=mx.uint32) if nibbles is None else mx.array(nibbles, dtype=mx.uint32)
    values = (words.view(mx.uint32)[..., None] >> (positions * bits)) & ((1 << bits) - 1)
    return values.reshape(rows, columns * (32 // bits))
