"""Conversion of GGML tensor types to plain arrays or MLX affine quantization (`w = q * scale + bias`).

Q4, Q5 and Q8_0 blocks are affine over 32 weights and keep their codes: the 8, 16 or 128 that Q4_0, Q5_0 and Q8_0
subtract, times the scale, becomes the bias. IQ4_NL, IQ4_XS and MXFP4 look up 4-bit codes in a table of integers, which
become affine codes of 8 and 5 bits. Q6_K is affine over 16 weights. In float32 all of them equal the reference
dequantizer bit for bit, up to the sign of zero. Q2_K, Q3_K, IQ1, IQ2, IQ3 and TQ, and Q6_K without support for groups
of 16, are requantized to 8 bits. Experts in MXFP4 become MLX's mode of that name, with the same bits in another order.

Scales and biases are float16 if that is exact, since a decode step reads them all, and float32 otherwise.

A new type is an unpacker here with its row in `_UNPACK`, its block in `header.BLOCKS`, and its name in `_WIDE` if its
scales may need float32. Tests compare every type with the reference dequantizer. Dimensions: N blocks, G groups.

Guards: tests/models/gguf/test_tensors.py and test_convert.py.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from headrace.models.checkpoint.quantization import Groups
from headrace.models.gguf.container import RawTensor
from headrace.models.gguf.header import BLOCKS
from headrace.runtime.errors import CheckpointError

Array = npt.NDArray[Any]
Bytes = npt.NDArray[Any]  # of uint8, which numpy's stubs lose over shifts and masks
Words = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float32]

GROUP_SIZE = 32  # weights that share a scale in Q4, Q5, Q8_0, IQ4 and MXFP4, and in MLX's smallest groups
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
    """Convert a quantized matrix to MLX's layout, chunk by chunk. Raises CheckpointError for a non-finite scale.

    groups_of_16: whether the decoder supports them.
    """
    unpack, bits, group_size = _UNPACK[tensor.type]
    if group_size < GROUP_SIZE and not groups_of_16:
        unpack = _requantized(tensor.type)
        bits = 8
        group_size = GROUP_SIZE
    columns = tensor.shape[-1]
    block, block_bytes = BLOCKS[tensor.type]
    blocks = tensor.data.reshape(-1, block_bytes)
    groups = len(blocks) * block // group_size
    packed = np.empty((groups, bits * group_size // 8), np.uint8)
    scales = np.empty(groups, np.float32)
    biases = np.empty(groups, np.float32)
    max_error = 0.0
    done = 0
    step = _CHUNK_WEIGHTS // block
    for start in range(0, len(blocks), step):
        with np.errstate(over="ignore", invalid="ignore"):  # such scales are refused below
            codes, scale, bias, error = unpack(blocks[start : start + step])
        if not (np.isfinite(scale).all() and np.isfinite(bias).all()):
            raise CheckpointError(f"tensor {tensor.name} ({tensor.type}) has a scale that is not finite")
        end = done + len(codes)
        packed[done:end] = _pack(codes, bits)
        scales[done:end] = scale
        biases[done:end] = bias
        max_error = max(max_error, error)
        done = end
    as_rows = (*tensor.shape[:-1], columns // group_size)
    half = _fits_half(scales) and _fits_half(biases)
    dtype = np.float16 if half else np.float32
    return Affine(
        packed.view("<u4").reshape(*tensor.shape[:-1], -1),
        scales.astype(dtype, copy=False).reshape(as_rows),
        biases.astype(dtype, copy=False).reshape(as_rows),
        Groups(bits, group_size),
        max_error,
    )


def to_mxfp4(tensor: RawTensor) -> Affine:
    """Convert MXFP4 to MLX's mode of that name: the same codes, reordered. Raises CheckpointError as `to_affine`."""
    blocks = tensor.data.reshape(-1, BLOCKS["MXFP4"][1])
    exponents = np.ascontiguousarray(blocks[:, 0])
    if (exponents > _MOST_EXPONENT).any():
        raise CheckpointError(f"tensor {tensor.name} (MXFP4) has a scale that is not finite")
    packed = np.empty((len(blocks), 16), np.uint8)
    step = _CHUNK_WEIGHTS // 32
    for start in range(0, len(blocks), step):
        packed[start : start + step] = _pack(_nibbles(_part(blocks[start : start + step], 1, 16)), 4)
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


def _pack(codes: Bytes, bits: int) -> Bytes:
    """Pack codes (G, N) to bytes (G, N * bits / 8): a little-endian bit stream, first code in the lowest bits."""
    if bits == 8:
        return codes
    # Neighbours move together in words of 8 codes: pairs, then fours, then all. The upper one of two fields of `width`
    # bits moves down to the codes of the lower one: of 4 bits, 0x0b0a becomes 0x00ba.
    words: Words = np.ascontiguousarray(codes).reshape(-1).view("<u8")
    for width in (8, 16, 32):
        low = _REPEATED[width]
        moved = words >> np.uint64(width - width * bits // 8)
        moved &= low << np.uint64(width * bits // 8)
        words = words & low
        words |= moved
    return _low_bytes(words, bits).reshape(len(codes), -1)


def _low_bytes(words: Words, count: int) -> Bytes:
    """Return the `count` low bytes of each word, 4, 5 or 6, back to back. The others are zero."""
    if count == 4:
        return np.ascontiguousarray(words.view("<u4")[::2]).view(np.uint8)
    # Whole machine words are written, since numpy copies rows of a few bytes slowly.
    if count == 6:
        first = np.ascontiguousarray(words[0::2])
        second = np.ascontiguousarray(words[1::2])
        pairs = np.empty(len(first), _PAIRS)
        pairs["a"] = first | second << np.uint64(48)
        pairs["b"] = second >> np.uint64(16)
        return pairs.view(np.uint8)
    first, second, third, fourth = (np.ascontiguousarray(words[i::4]) for i in range(4))
    fours = np.empty(len(first), _FOURS)
    fours["a"] = first | second << np.uint64(40)
    fours["b"] = second >> np.uint64(24) | third << np.uint64(16) | fourth << np.uint64(56)
    fours["c"] = fourth >> np.uint64(8)
    return fours.view(np.uint8)


# The lower one of every two fields of a width, all bits set: 0x00ff00ff00ff00ff for a width of 8.
_REPEATED = {width: np.uint64(sum((1 << width) - 1 << at for at in range(0, 64, 2 * width))) for width in (8, 16, 32)}
_PAIRS = np.dtype([("a", "<u8"), ("b", "<u4")])  # 2 words of 6 bytes
_FOURS = np.dtype([("a", "<u8"), ("b", "<u8"), ("c", "<u4")])  # 4 words of 5 bytes


# Each maps (N, bytes per block) to codes (G, group size), scales (G,), biases (G,) and the largest error.
Unpacked = tuple[Bytes, Floats, Floats, float]


def _half(blocks: Bytes, start: int) -> Floats:
    """Return the float16 at byte `start` of each block, (N,)."""
    halves: Array = np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2")
    return halves[:, 0].astype(np.float32)


def _part(blocks: Bytes, start: int, count: int) -> Bytes:
    """Return `count` bytes of each block, (N, count) and contiguous: copied as one item, which is faster than a row."""
    kind = np.dtype({"names": ["part"], "formats": [f"V{count}"], "offsets": [start], "itemsize": blocks.shape[1]})
    whole = np.ascontiguousarray(blocks).view(kind)
    return np.ascontiguousarray(whole["part"]).view(np.uint8).reshape(-1, count)


def _interleaved(parts: Sequence[Bytes]) -> Bytes:
    """Return rows (N, len(parts) * B): the first row of each part (N, B), then the second ones."""
    rows, width = parts[0].shape
    out = np.empty((rows, len(parts)), f"V{width}")
    for index, part in enumerate(parts):
        out[:, index] = part.view(f"V{width}")[:, 0]
    return out.view(np.uint8)


def _bits(packed: Bytes, shift: int, mask: int) -> Bytes:
    """Return (packed >> shift) & mask of contiguous bytes (N, B), B a multiple of 8: in words, which is faster."""
    words = packed.view("<u8") >> np.uint64(shift)
    words &= np.uint64(mask * 0x0101010101010101)
    return words.view(np.uint8)


def _nibbles(packed: Bytes) -> Bytes:
    """Unpack bytes (N, B) to codes (N, 2B): the first half of a block is in the low nibbles."""
    return _interleaved([_bits(packed, 0, 15), _bits(packed, 4, 15)])


# Unpackers. d is a block's scale; offsets are bytes of a block, as ggml lays it out (ggml-common.h).


def _q4_0(blocks: Bytes) -> Unpacked:
    d = _half(blocks, 0)
    return _nibbles(_part(blocks, 2, 16)), d, -8 * d, 0.0


def _q4_1(blocks: Bytes) -> Unpacked:
    return _nibbles(_part(blocks, 4, 16)), _half(blocks, 0), _half(blocks, 2), 0.0


def _q5_0(blocks: Bytes) -> Unpacked:
    d = _half(blocks, 0)
    return _with_fifth_bit(_part(blocks, 2, 4), _part(blocks, 6, 16)), d, -16 * d, 0.0


def _q5_1(blocks: Bytes) -> Unpacked:
    return _with_fifth_bit(_part(blocks, 4, 4), _part(blocks, 8, 16)), _half(blocks, 0), _half(blocks, 2), 0.0


def _with_fifth_bit(high: Bytes, low: Bytes) -> Bytes:
    """Combine bytes (N, 4) of one bit per code and nibbles (N, 16) to codes (N, 32)."""
    fifth: Bytes = _FIFTH[high.reshape(-1)].view(np.uint8).reshape(-1, GROUP_SIZE)
    return _nibbles(low) | fifth


# The fifth bits of 8 codes, a byte each, for every byte that has them.
_FIFTH = (np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") << 4).view("<u8")[:, 0]


def _q8_0(blocks: Bytes) -> Unpacked:
    d = _half(blocks, 0)
    return blocks[:, 2:] ^ 0x80, d, -128 * d, 0.0  # flipping the sign bit adds 128 to an int8


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Return scales and biases of Q4_K and Q5_K: eight 6-bit pairs per block, the last four split into 4 + 2 bits."""
    first = blocks[:, 4:8]
    second = blocks[:, 8:12]
    high = blocks[:, 12:16]
    scales = np.concatenate([first & 63, (high & 15) | (first >> 6 << 4)], axis=1)  # (N, 8)
    minima = np.concatenate([second & 63, (high >> 4) | (second >> 6 << 4)], axis=1)
    d = _half(blocks, 0)[:, None]
    d_min = _half(blocks, 2)[:, None]
    # Exact: an 11-bit times a 6-bit significand fits float32.
    return (d * scales).reshape(-1), (-d_min * minima).reshape(-1)


def _q4_k(blocks: Bytes) -> Unpacked:
    codes = _nibbles(_part(blocks, 16, 128).reshape(-1, 32)).reshape(-1, GROUP_SIZE)
    return codes, *_k_scales(blocks), 0.0


def _q5_k(blocks: Bytes) -> Unpacked:
    low = _nibbles(_part(blocks, 48, 128).reshape(-1, 32)).reshape(-1, GROUP_SIZE)
    high = _part(blocks, 16, 32)
    # Bit g of the 32 high bytes is the fifth bit of group g.
    fifth = _interleaved([_bits(high, group, 1) for group in range(8)]).reshape(-1, GROUP_SIZE)
    return low | (fifth << 4), *_k_scales(blocks), 0.0


def _q6_k(blocks: Bytes) -> Unpacked:
    low = _nibbles(_part(blocks, 0, 128).reshape(-1, 64)).reshape(-1, 16)
    packed = _part(blocks, 128, 64).reshape(-1, 32)
    # Two bits of each of four neighbours 32 apart share a byte.
    high = _interleaved([_bits(packed, shift, 3) for shift in (0, 2, 4, 6)]).reshape(-1, 16)
    codes = low | (high << 4)
    scale = (_half(blocks, 208)[:, None] * _part(blocks, 192, 16).view(np.int8)).reshape(-1)
    return codes, scale, -32 * scale, 0.0


# Values of 4-bit codes, as codes of affine groups, which start at 0: the bias has the 128 or 12 that is added here.
# The lowest values are -127 and -12.
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice those of FP4
_IQ4 = (np.array(_IQ4_VALUES, np.int16) + 128).astype(np.uint8)
_FP4 = (np.array(_FP4_VALUES, np.int8) + 12).astype(np.uint8)
_MOST_EXPONENT = 251  # of an MXFP4 block, so that its largest code times its scale is finite in float32


def _iq4_nl(blocks: Bytes) -> Unpacked:
    d = _half(blocks, 0)
    return _IQ4[_nibbles(_part(blocks, 2, 16))], d, -128 * d, 0.0


def _iq4_xs(blocks: Bytes) -> Unpacked:
    low = (blocks[:, 4:8, None] >> np.array([0, 4], np.uint8)).reshape(-1, 8) & 15
    high = (blocks[:, 2:4, None] >> np.array([0, 2, 4, 6], np.uint8)).reshape(-1, 8) & 3
    scale = (_half(blocks, 0)[:, None] * ((low | high << 4).astype(np.float32) - 32)).reshape(-1)
    return _IQ4[_nibbles(_part(blocks, 8, 128).reshape(-1, 16))], scale, -128 * scale, 0.0


def _mxfp4(blocks: Bytes) -> Unpacked:
    from gguf.quants import MXFP4  # late, as in `dequantized`

    exponent = blocks[:, 0]
    scale = np.where(exponent > _MOST_EXPONENT, np.float32(np.nan), MXFP4.e8m0_to_fp32_half(exponent))
    return _FP4[_nibbles(_part(blocks, 1, 16))], scale, -12 * scale, 0.0


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

    unpack: Callable[[Bytes], Unpacked]
    bits: int  # of a code
    group_size: int  # codes


_UNPACK = {
    "Q4_0": _Unpacking(_q4_0, 4, 32),
    "Q4_1": _Unpacking(_q4_1, 4, 32),
    "Q5_0": _Unpacking(_q5_0, 5, 32),
    "Q5_1": _Unpacking(_q5_1, 5, 32),
    "Q8_0": _Unpacking(_q8_0, 8, 32),
    "Q4_K": _Unpacking(_q4_k, 4, 32),
    "Q5_K": _Unpacking(_q5_k, 5, 32),
    "Q6_K": _Unpacking(_q6_k, 6, 16),
    "IQ4_NL": _Unpacking(_iq4_nl, 8, 32),
    "IQ4_XS": _Unpacking(_iq4_xs, 8, 32),
    "MXFP4": _Unpacking(_mxfp4, 5, 32),
    **{kind: _Unpacking(_requantized(kind), 8, 32) for kind in _REQUANTIZED},
}
