"""Lazy reading of a checkpoint's arrays, with foreign quantization converted to MLX's; writing of arrays.

Tensors are those that `open_checkpoint` checked. Foreign matrices become what `ForeignMatrix` says; a new layout is a
branch of `_converted`. Our decoder (`network.weight_arrays`), mlx-lm's classes (`mlx_lm.load`) and ranks (`file_parts`)
read through here. Guard: tests/models/checkpoint/test_foreign.py.
"""

import errno
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

from headrace.models.checkpoint.foreign import nf4, packed, scaled
from headrace.models.checkpoint.foreign.matrices import ForeignMatrix
from headrace.models.checkpoint.safetensors import Checkpoint


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
        values = scaled.dequantize(data, parts["scales"], zeros, matrix.blocks)
    elif matrix.layout == "nf4":
        values = nf4.dequantize(matrix, parts)
    else:
        q, steps, zero = packed.unpack(matrix, data, parts["scales"], zeros, zeros_less_one)
        order = parts.get("order")
        if order is not None:
            packed.check_order(matrix, order)
        if matrix.exact and not plain:
            words, scales, biases = packed.affine(matrix, q, steps, zero)
            return {name: words, f"{module}.scales": scales, f"{module}.biases": biases}
        values = packed.dequantize(matrix, q, steps, zero, order)
    if plain:
        return {name: values}
    assert matrix.bits is not None
    words, scales, biases = mx.quantize(values, group_size=matrix.group_size, bits=matrix.bits)
    return {name: words, f"{module}.scales": scales, f"{module}.biases": biases}


def save_arrays(file: Path, arrays: dict[str, mx.array]) -> None:
    """Write a safetensors file. Raises OSError, also where MLX raises RuntimeError: mostly on a full disk."""
    try:
        mx.save_safetensors(str(file), arrays, metadata={"format": "mlx"})
    except RuntimeError as error:
        if not str(error).startswith(("[write]", "[save_safetensors]")):
            raise
        raise OSError(errno.EIO, "writing failed; the disk may be full", str(file)) from error
