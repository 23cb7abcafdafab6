"""Conversion of GGML tensor types to plain arrays or MLX affine quantization (`w = q * scale + bias`).

Q4, Q5 and Q8_0 blocks are affine over 32 weights and keep their codes: the 8, 16 or 128 that Q4_0, Q5_0 and Q8_0
subtract, times the scale, becomes the bias. IQ4_NL, IQ4_XS and MXFP4 look up 4-bit codes in a table of integers, which
become affine codes of 8 and 5 bits. Q6_K is affine over 16 weights. In float32 all of them equal the reference
dequantizer bit for bit, up to the sign of zero. Q2_K, Q3_K, IQ1, IQ2, IQ3 and TQ, and Q6_K without support for groups
of 16, are requantized to 8 bits. Experts in MXFP4 become MLX's mode of that name, with the same bits in another order.

Scales and biases are float16 if that is exact, since a decode step reads them all, and float32 otherwise.

The kernels unpack blocks (runtime/native/core/blocks.cpp), and numpy where there are none (`numpy_blocks`).
A new type is an unpacker in both with its row in `_UNPACK`, its block in `header.BLOCKS`, and its name in `_WIDE` if
its scales may need float32. Tests compare every type with the reference dequantizer. Dimensions: N blocks, G groups.

Guards: tests/models/gguf/test_tensors.py and test_convert.py.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from headrace.models.checkpoint.quantization import Groups
from headrace.models.gguf import numpy_blocks
from headrace.models.gguf.container import RawTensor
from headrace.models.gguf.header import BLOCKS
from headrace.models.gguf.numpy_blocks import GROUP_SIZE, Array, Bytes, Floats, Unpacked
from headrace.runtime.errors import CheckpointError
from headrace.runtime.ops import native
from headrace.runtime.ops.native_plans import missing

# Types with scales that half precision would round, since they are products, or does not hold (powers of two).
_WIDE = ("Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "MXFP4")
_CHUNK_WEIGHTS = 1 << 18  # weights unpacked at a time: their codes fit a processor's cache


class Affine(Struct, frozen=True):
    """A quantized matrix, or one per expert, in MLX's layout."""

    weight: Array  # (..., rows, columns * bits / 32), uint32
    scales: Array  # (..., rows, columns / group_size), float16 or float32; uint8 exponents in mode mxfp4
    biases: Array | None  # as scales; None in mode mxfp4
    groups: Groups  # bits, group size and mode
    max_error: float  # against the source's exact values


def is_quantized(tensor: RawTensor) -> bool:
    """Return whether a tensor is a quantized matrix or stack of matrices."""
    return tensor.type in _UNPACK and len(tensor.shape) >= 2


def stored_groups(tensor: RawTensor, *, groups_of_16: bool) -> Groups:
    """Return the quantization of a converted matrix. groups_of_16: see `to_affine`."""
    if tensor.type == "MXFP4" and len(tensor.shape) > 2:
        return Groups(4, GROUP_SIZE, "mxfp4")
    _, bits, group_size = _UNPACK[tensor.type]
    if groups_of_16 or group_size >= GROUP_SIZE:
        return Groups(bits, group_size)
    return Groups(8, GROUP_SIZE)


def scale_type(kind: str, groups: Groups) -> str:
    """Return the safetensors type of scales and biases that a linked file has for affine matrices of a type.

    A type's scales are half precision in the file, and with them the biases, up to their range: `parts` refuses a Q8_0
    block whose scale of 1000 makes a bias of -128,000. Types in `_WIDE` may need float32.

    groups: of the matrix (`stored_groups`). Where they are not the type's own, it was requantized.
    """
    is_requantized_here = groups.group_size != _UNPACK[kind].group_size
    return "F32" if kind in _WIDE and not is_requantized_here else "F16"


def plain_type(kind: str) -> str:
    """Return the safetensors type of unquantized tensors from a type."""
    return "F32" if kind in _UNPACK else kind


def is_requantized(kind: str) -> bool:
    """Return whether matrices of a type have no exact form here: they are rounded to 8 bits, which takes long."""
    return kind in _REQUANTIZED


def to_affine(tensor: RawTensor, *, groups_of_16: bool = True) -> Affine:
    """Convert a quantized matrix to MLX's layout. Raises CheckpointError for a non-finite scale.

    groups_of_16: whether the decoder supports them.
    """
    unpacking = _UNPACK[tensor.type]
    in_kernels = _kernels_unpack(tensor.type)
    if unpacking.group_size < GROUP_SIZE and not groups_of_16:
        unpacking = _Unpacking(_requantized(tensor.type), 8, GROUP_SIZE)
        in_kernels = False
    _, bits, group_size = unpacking
    columns = tensor.shape[-1]
    block, block_bytes = BLOCKS[tensor.type]
    blocks = tensor.data.reshape(-1, block_bytes)
    packed = np.empty((len(blocks) * block // group_size, bits * group_size // 8), np.uint8)
    if in_kernels:
        scales, biases = _unpacked_by_kernels(tensor, blocks, packed)
        max_error = 0.0
    else:
        scales, biases, max_error = _unpacked_in_numpy(tensor, blocks, packed, unpacking)
    if scales.dtype != np.float16 and _fits_half(scales) and _fits_half(biases):
        scales = scales.astype(np.float16)
        biases = biases.astype(np.float16)
    as_rows = (*tensor.shape[:-1], columns // group_size)
    return Affine(
        packed.view("<u4").reshape(*tensor.shape[:-1], -1),
        scales.reshape(as_rows),
        biases.reshape(as_rows),
        Groups(bits, group_size),
        max_error,
    )


def _kernels_unpack(kind: str) -> bool:
    """Return whether the kernels unpack a type's blocks: all types but those that the reference dequantizes."""
    return missing is None and kind not in _REQUANTIZED


def _unpacked_by_kernels(tensor: RawTensor, blocks: Bytes, packed: Bytes) -> tuple[Array, Array]:
    """Fill the codes, packed in bits (G, bytes), and return scales and biases (G,), in float16 unless that rounds."""
    for dtype in (np.float32,) if tensor.type in _WIDE else (np.float16, np.float32):
        scales = np.empty(len(packed), dtype)
        biases = np.empty(len(packed), dtype)
        is_finite, is_exact = native.unpack_blocks(tensor.type, blocks, packed, scales, biases)
        if not is_finite:
            raise _no_number(tensor)
        if is_exact:
            break
    return scales, biases


def _unpacked_in_numpy(
    tensor: RawTensor, blocks: Bytes, packed: Bytes, unpacking: "_Unpacking"
) -> tuple[Array, Array, float]:
    """Fill the codes as `_unpacked_by_kernels`, chunk by chunk, and return scales and biases in float32, and the error.

    The error is the largest one, against the source's exact values.
    """
    scales = np.empty(len(packed), np.float32)
    biases = np.empty(len(packed), np.float32)
    max_error = 0.0
    done = 0
    step = _CHUNK_WEIGHTS // BLOCKS[tensor.type][0]
    for start in range(0, len(blocks), step):
        with np.errstate(over="ignore", invalid="ignore"):  # such scales are refused below
            codes, scale, bias, error = unpacking.unpack(blocks[start : start + step])
        if not (np.isfinite(scale).all() and np.isfinite(bias).all()):
            raise _no_number(tensor)
        end = done + len(codes)
        packed[done:end] = numpy_blocks.pack(codes, unpacking.bits)
        scales[done:end] = scale
        biases[done:end] = bias
        max_error = max(max_error, error)
        done = end
    return scales, biases, max_error


def _no_number(tensor: RawTensor) -> CheckpointError:
    return CheckpointError(f"tensor {tensor.name} ({tensor.type}) has a scale that is not finite")


def to_mxfp4(tensor: RawTensor) -> Affine:
    """Convert MXFP4 to MLX's mode of that name: the same codes, reordered. Raises CheckpointError as `to_affine`."""
    blocks = tensor.data.reshape(-1, BLOCKS["MXFP4"][1])
    exponents = np.ascontiguousarray(blocks[:, 0])
    if (exponents > numpy_blocks.MOST_EXPONENT).any():
        raise _no_number(tensor)
    packed = np.empty((len(blocks), 16), np.uint8)
    if _kernels_unpack("MXFP4"):
        native.unpack_blocks("MXFP4 codes", blocks, packed)
    else:
        step = _CHUNK_WEIGHTS // 32
        for start in range(0, len(blocks), step):
            packed[start : start + step] = numpy_blocks.fp4_codes(blocks[start : start + step])
    lead = tensor.shape[:-1]
    groups = Groups(4, GROUP_SIZE, "mxfp4")
    return Affine(packed.view("<u4").reshape(*lead, -1), exponents.reshape(*lead, -1), None, groups, 0.0)


def to_plain(tensor: RawTensor) -> tuple[Array, str]:
    """Return an unquantized tensor and its safetensors dtype; quantized vectors become exact float32.

    BF16 is returned as raw 16-bit words, since numpy lacks the type. Raises CheckpointError for NaN or infinity.
    """
    if tensor.type in _UNPACK:
        with np.errstate(over="ignore", invalid="ignore"):
            values = dequantized(tensor.data, tensor.type).reshape(tensor.shape)
        return _finite(values.astype("<f4").view("<u4"), 0x7F800000, tensor).view("<f4"), "F32"
    # Exponent bits of each type, and the words that they are read in
    exponent, word = {"F32": (0x7F800000, "<u4"), "F16": (0x7C00, "<u2"), "BF16": (0x7F80, "<u2")}[tensor.type]
    words = _finite(tensor.data.view(word).reshape(tensor.shape), exponent, tensor)
    return words, tensor.type


def dequantized(blocks: Bytes, kind: str) -> Floats:
    """Return the values of blocks by the reference, in the package gguf. Most files have no tensor that needs it."""
    from gguf import GGMLQuantizationType  # late: the package takes 0.1 s to import
    from gguf.quants import dequantize

    values: Floats = dequantize(blocks, GGMLQuantizationType[kind])
    return values


def _finite(words: Array, exponent: int, tensor: RawTensor) -> Array:
    """Raise CheckpointError for NaN or infinity: floats with all exponent bits set."""
    flat = words.reshape(-1)
    for start in range(0, flat.size, _CHUNK_WEIGHTS):
        if ((flat[start : start + _CHUNK_WEIGHTS] & exponent) == exponent).any():
            raise CheckpointError(f"tensor {tensor.name} ({tensor.type}) contains NaN or infinity")
    return words


def _fits_half(values: Floats) -> bool:
    """Return whether float16 has all these values."""
    # A part at a time: products of scales, as in Q4_K, fail in the first one.
    with np.errstate(over="ignore"):
        for start in range(0, len(values), _CHUNK_WEIGHTS):
            part = values[start : start + _CHUNK_WEIGHTS]
            if not np.array_equal(part.astype(np.float16).astype(np.float32), part):
                return False
    return True


def _requantized(kind: str) -> Callable[[Bytes], Unpacked]:
    """Return an unpacker that requantizes the reference's values to 8 bits."""
    return lambda blocks: _requantize(dequantized(blocks, kind).reshape(-1, GROUP_SIZE))


def _requantize(values: Floats) -> Unpacked:
    """Quantize (G, 32) values to 8 bits.

    Scale and bias are rounded outwards to float16 first, so that every value is in range and off by at most half a
    rounded step.
    """
    low = values.min(axis=1)
    high = values.max(axis=1)
    bias = low.astype(np.float16)
    bias = np.where(bias > low, np.nextafter(bias, np.float16(-np.inf)), bias).astype(np.float32)
    width = (high - bias) / np.float32(255)
    scale = width.astype(np.float16)
    scale = np.where(scale < width, np.nextafter(scale, np.float16(np.inf)), scale).astype(np.float32)
    wide = ~(np.isfinite(scale) & np.isfinite(bias))  # beyond the range of float16: these groups stay in float32
    bias = np.where(wide, low, bias)
    scale = np.where(wide, (high - low) / np.float32(255), scale)
    steps = (values - bias[:, None]) / np.where(scale > 0, scale, 1)[:, None]
    codes = np.rint(steps).clip(0, 255).astype(np.uint8)
    error = np.abs(codes * scale[:, None] + bias[:, None] - values).max()
    return codes, scale, bias, float(error)


_REQUANTIZED = (
    "Q2_K", "Q3_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0",
)  # fmt: skip


class _Unpacking(NamedTuple):
    """Conversion of a type's blocks to affine groups."""

    unpack: Callable[[Bytes], Unpacked]  # in numpy
    bits: int  # of a code
    group_size: int  # codes


_UNPACK = {
    "Q4_0": _Unpacking(numpy_blocks.q4_0, 4, 32),
    "Q4_1": _Unpacking(numpy_blocks.q4_1, 4, 32),
    "Q5_0": _Unpacking(numpy_blocks.q5_0, 5, 32),
    "Q5_1": _Unpacking(numpy_blocks.q5_1, 5, 32),
    "Q8_0": _Unpacking(numpy_blocks.q8_0, 8, 32),
    "Q4_K": _Unpacking(numpy_blocks.q4_k, 4, 32),
    "Q5_K": _Unpacking(numpy_blocks.q5_k, 5, 32),
    "Q6_K": _Unpacking(numpy_blocks.q6_k, 6, 16),
    "IQ4_NL": _Unpacking(numpy_blocks.iq4_nl, 8, 32),
    "IQ4_XS": _Unpacking(numpy_blocks.iq4_xs, 8, 32),
    "MXFP4": _Unpacking(numpy_blocks.mxfp4, 5, 32),
    **{kind: _Unpacking(_requantized(kind), 8, 32) for kind in _REQUANTIZED},
}
