"""Lazy reading of a checkpoint's arrays, with foreign quantization converted to MLX's; writing of arrays.

Tensors are those that `open_checkpoint` checked. Foreign matrices become what `ForeignMatrix` says; a new layout is a
branch of `_converted`. Our decoder (`network.weight_arrays`), mlx-lm's classes (`mlx_lm.load`) and ranks (`file_parts`)
read through here.

Foreign layouts but `nf4` are W = scale * (q - zero). Dimensions: W (N, K) with G groups in a row, C words in a row.

Guard: tests/models/checkpoint/test_foreign.py.
"""

import errno
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx

from headrace.models.checkpoint.foreign import nf4
from headrace.models.checkpoint.foreign.matrices import ForeignMatrix
from headrace.models.checkpoint.safetensors import Checkpoint
from headrace.runtime.errors import CheckpointError


def read_arrays(
    checkpoint: Checkpoint, *, as_float: Callable[[str, ForeignMatrix], bool] | None = None
) -> dict[str, mx.array]:
    """Return the arrays that `checkpoint.tensors` lists; MLX reads their bytes on evaluation.

    as_float(name, matrix): whether to return a foreign matrix in float32 instead of affine groups. Raises
    CheckpointError for column indices outside the groups.
    """
    stored: dict[str, mx.array] = {}
    for shard in checkpoint.shards:
        loaded = mx.load(str(shard), format="safetensors")
        assert isinstance(loaded, dict)
        stored |= loaded
    foreign = checkpoint.foreign
    if foreign is None:
        return stored
    made: dict[str, mx.array] = {}  # converted; the stored parts are taken out
    for name, matrix in foreign.matrices.items():
        parts = {role: stored.pop(part) for role, part in matrix.parts.items()}
        plain = matrix.bits is None or (as_float is not None and as_float(name, matrix))
        made |= _converted(name, matrix, parts, foreign.zeros_less_one, plain)
    for name in foreign.dropped:
        stored.pop(name, None)
    return stored | made


def _converted(
    name: str, matrix: ForeignMatrix, parts: dict[str, mx.array], zeros_less_one: bool, plain: bool
) -> dict[str, mx.array]:
    """Return the arrays that a foreign matrix becomes.

    parts: stored arrays by role, see `ForeignMatrix.parts`.
    zeros_less_one: see `Foreign`.
    plain: in float32, not in affine groups.
    """
    module = name.removesuffix(".weight")
    data = parts["data"]
    zeros = parts.get("zeros")
    if matrix.layout == "scaled":
        values = dequantize_scaled(data, parts["scales"], zeros, matrix.blocks)
    elif matrix.layout == "nf4":
        values = nf4.dequantize(matrix, parts)
    else:
        q, steps, zero = unpack(matrix, data, parts["scales"], zeros, zeros_less_one)
        order = parts.get("order")
        if order is not None:
            check_order(matrix, order)
        if matrix.exact and not plain:
            words, scales, biases = affine(matrix, q, steps, zero)
            return {name: words, f"{module}.scales": scales, f"{module}.biases": biases}
        values = dequantize(matrix, q, steps, zero, order)
    if plain:
        return {name: values}
    assert matrix.bits is not None
    words, scales, biases = mx.quantize(values, group_size=matrix.group_size, bits=matrix.bits)
    return {name: words, f"{module}.scales": scales, f"{module}.biases": biases}


def save_arrays(file: Path, arrays: dict[str, mx.array]) -> None:
    """Write a safetensors file. Raises OSError, also where MLX raises RuntimeError: mostly on a full disk.

    docs/workarounds.md lists it.
    """
    try:
        mx.save_safetensors(str(file), arrays, metadata={"format": "mlx"})
    except RuntimeError as error:
        if not str(error).startswith(("[write]", "[save_safetensors]")):
            raise
        raise OSError(errno.EIO, "writing failed; the disk may be full", str(file)) from error


# Integers of 2, 4 or 8 bits in 32-bit words: GPTQ, AWQ and compressed-tensors

# Nibble of a word that has value i of eight neighbours, in AWQ.
_AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)


def unpack(
    matrix: ForeignMatrix, data: mx.array, scales: mx.array, zeros: mx.array | None, zeros_less_one: bool
) -> tuple[mx.array, mx.array, mx.array]:
    """Return (q (N, K) uint32, scales (N, G) float32, zeros (N, G) float32), groups in the file's order.

    data, scales, zeros: as stored. zeros_less_one: zero points are stored minus one (`Foreign`).
    """
    bits = matrix.stored_bits
    if matrix.layout in ("ternary", "ternary_over"):
        # Two bits at 2 i of the stored row r are row r + i N / 4. They are 0 for -1.
        q = mx.concatenate([(data >> shift) & 3 for shift in (0, 2, 4, 6)]).astype(mx.uint32)
        scale = scales.astype(mx.float32).reshape(1, 1)
        if matrix.layout == "ternary_over":
            scale = 1 / scale
        return q, mx.broadcast_to(scale, (len(q), 1)), mx.ones((len(q), 1))
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
    """Return MLX's packed words, scales and biases, for groups that MLX supports.

    They represent W exactly in float32: W = scale * q + bias with bias = -scale * zero.
    """
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


# 8-bit floats (E4M3) and integers with a scale per tensor, channel, group or block


def dequantize_scaled(data: mx.array, scales: mx.array, zeros: mx.array | None, blocks: Sequence[int]) -> mx.array:
    """Dequantize data (..., N, K) to float32 of that shape: E4M3 bits in uint8, or int8.

    Each number converts exactly; the difference and the product are rounded to float32.

    scales, zeros: one number per block; zeros None: 0.
    blocks: elements of each axis that share a scale; the last block of an axis may be cut short.
    """
    values = mx.from_fp8(data, dtype=mx.float32) if data.dtype == mx.uint8 else data.astype(mx.float32)
    if zeros is not None:
        values = values - _spread(zeros.astype(mx.float32), data.shape, blocks)
    return values * _spread(scales.astype(mx.float32), data.shape, blocks)


def _spread(scales: mx.array, shape: Sequence[int], blocks: Sequence[int]) -> mx.array:
    """Expand one scale per block to an array that broadcasts to `shape`."""
    scales = scales.reshape([-(-size // block) for size, block in zip(shape, blocks, strict=True)])
    for axis, (size, block) in enumerate(zip(shape, blocks, strict=True)):
        if 1 < block < size:
            scales = mx.repeat(scales, block, axis=axis)
            if scales.shape[axis] > size:
                scales = mx.split(scales, [size], axis=axis)[0]
    return scales
