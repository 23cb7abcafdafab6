"""bitsandbytes' 4-bit matrices (NF4 and FP4): codes into a table of 16 values, with a scale per block of neighbours.

Blocks run over the flattened matrix. With double quantization the scales are 8-bit codes of their own: into a table of
256 values, with a scale per block and one offset (Dettmers et al., arXiv:2305.14314).

    W                       codes, two in a byte, the first in the high bits
    W.absmax, W.quant_map   scales, or their codes; the table
    W.nested_absmax, W.nested_quant_map       of the scales
    W.quant_state.bitsandbytes__nf4           JSON: shape, block sizes, offset

`formats.py` here finds such checkpoints. Guard: tests/models/checkpoint/test_foreign.py.
"""

from collections.abc import Mapping
from math import isfinite, prod
from typing import TYPE_CHECKING

from msgspec import Struct

from headrace.models.checkpoint.foreign.matrices import ForeignMatrix
from headrace.models.checkpoint.shard_header import TensorInfo, read_small_object
from headrace.runtime.errors import CheckpointError

if TYPE_CHECKING:
    import mlx.core as mx

STATES = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")
_NESTED = {"nested_scales": "nested_absmax", "nested_table": "nested_quant_map"}


class CodedMatrix(Struct, frozen=True):
    """Facts of a 4-bit matrix (N, K)."""

    shape: tuple[int, int]
    parts: dict[str, str]  # tensor by role, the nested ones only with double quantization
    codes: int  # that share a scale
    scales: int  # that share a scale of their own; 1 by default
    offset: float  # of the scales


def read_matrix(weight: str, state: str, tensors: Mapping[str, TensorInfo]) -> CodedMatrix:
    """Return the facts of the matrix `weight`. Reads its state, a few hundred bytes of the shard.

    Raises CheckpointError for parts that are missing or contradict each other.
    """
    parts = {"data": weight, "scales": f"{weight}.absmax", "table": f"{weight}.quant_map"}
    nested = f"{weight}.nested_absmax" in tensors
    if nested:
        parts |= {role: f"{weight}.{end}" for role, end in _NESTED.items()}
    for name in parts.values():
        if name not in tensors:
            raise CheckpointError(f"the checkpoint has {state} but no tensor {name}")

    # The state: shape, codes that share a scale, scales that share one
    stated = read_small_object(tensors[state], state)
    shape = stated.get("shape")
    offset = stated.get("nested_offset", 0.0)
    blocks = (stated.get("blocksize"), stated.get("nested_blocksize", 1))
    sizes: list[object] = [*shape, *blocks] if isinstance(shape, list) and len(shape) == 2 else []
    # `isinstance` would accept true, which JSON may have there.
    counts = [size for size in sizes if type(size) is int and 0 < size < 1 << 40]
    if len(counts) != 4:
        raise CheckpointError(f"{state}: shape and block sizes must be positive integers")
    if isinstance(offset, bool) or not isinstance(offset, int | float) or not isfinite(offset):
        raise CheckpointError(f"{state}: nested_offset is {offset!r:.40}")

    # The parts, as these sizes imply them
    rows, columns, group, outer = counts
    scales = -(-rows * columns // group)
    # Elements by role; the last block of codes or scales may be shorter.
    wanted: dict[str, tuple[str, int]] = {
        "data": ("U8", -(-rows * columns // 2)), "scales": ("U8" if nested else "F32", scales), "table": ("F32", 16),
        "nested_scales": ("F32", -(-scales // outer)), "nested_table": ("F32", 256),
    }  # fmt: skip
    for role, name in parts.items():
        info = tensors[name]
        if (info.dtype, prod(info.shape)) != wanted[role]:
            raise CheckpointError(f"tensor {name} is {info.dtype} {info.shape}, which does not fit {state}")
    return CodedMatrix((rows, columns), parts, group, outer, float(offset))


def dequantize(matrix: ForeignMatrix, parts: "Mapping[str, mx.array]") -> "mx.array":
    """Return float32 (N, K): the table's value times the block's scale, each rounded once."""
    import mlx.core as mx  # late: headers are read without it

    scales = parts["scales"].reshape(-1)
    if "nested_scales" in parts:
        [outer] = matrix.blocks  # scales that share one
        values = parts["nested_table"].reshape(-1)[scales]
        scales = values * mx.repeat(parts["nested_scales"].reshape(-1), outer)[: values.size] + matrix.offset
    data = parts["data"].reshape(-1)
    # Two codes to a byte, the upper half first. An odd number of them leaves a half unused.
    codes = mx.stack([data >> 4, data & 15], axis=-1).reshape(-1)[: prod(matrix.shape)]
    values = parts["table"].reshape(-1)[codes]
    return (values * mx.repeat(scales, matrix.stored_group)[: values.size]).reshape(matrix.shape)
