"""Unpackers of GGUF's block types in numpy, for machines without the kernels (runtime/native/core/blocks.cpp): macOS.

Each maps blocks to codes, scales and biases, as the kernels do, to the bit. Numpy takes a step for all blocks at once,
so the steps are ordered by speed: whole machine words where there are any, rows copied as one item, no small loops.

Dimensions: N blocks, G groups. Guard: tests/models/gguf/test_tensors.py.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Bytes = npt.NDArray[Any]  # of uint8, which numpy's stubs lose over shifts and masks
Words = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float32]

GROUP_SIZE = 32  # weights that share a scale in Q4, Q5, Q8_0, IQ4 and MXFP4, and in MLX's smallest groups


def pack(codes: Bytes, bits: int) -> Bytes:
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


def fp4_codes(blocks: Bytes) -> Bytes:
    """Return the packed codes of MXFP4 blocks, as MLX's mode of that name has them, (N, 16)."""
    return pack(_nibbles(_part(blocks, 1, 16)), 4)


# Unpackers. d is a block's scale; offsets are bytes of a block, as ggml lays it out (ggml-common.h).


def q4_0(blocks: Bytes) -> Unpacked:
    d = _half(blocks, 0)
    return _nibbles(_part(blocks, 2, 16)), d, -8 * d, 0.0


def q4_1(blocks: Bytes) -> Unpacked:
    return _nibbles(_part(blocks, 4, 16)), _half(blocks, 0), _half(blocks, 2), 0.0


def q5_0(blocks: Bytes) -> Unpacked:
    d = _half(blocks, 0)
    return _with_fifth_bit(_part(blocks, 2, 4), _part(blocks, 6, 16)), d, -16 * d, 0.0


def q5_1(blocks: Bytes) -> Unpacked:
    return _with_fifth_bit(_part(blocks, 4, 4), _part(blocks, 8, 16)), _half(blocks, 0), _half(blocks, 2), 0.0


def _with_fifth_bit(high: Bytes, low: Bytes) -> Bytes:
    """Combine bytes (N, 4) of one bit per code and nibbles (N, 16) to codes (N, 32)."""
    fifth: Bytes = _FIFTH[high.reshape(-1)].view(np.uint8).reshape(-1, GROUP_SIZE)
    return _nibbles(low) | fifth


# The fifth bits of 8 codes, a byte each, for every byte that has them.
_FIFTH = (np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") << 4).view("<u8")[:, 0]


def q8_0(blocks: Bytes) -> Unpacked:
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


def q4_k(blocks: Bytes) -> Unpacked:
    codes = _nibbles(_part(blocks, 16, 128).reshape(-1, 32)).reshape(-1, GROUP_SIZE)
    return codes, *_k_scales(blocks), 0.0


def q5_k(blocks: Bytes) -> Unpacked:
    low = _nibbles(_part(blocks, 48, 128).reshape(-1, 32)).reshape(-1, GROUP_SIZE)
    high = _part(blocks, 16, 32)
    # Bit g of the 32 high bytes is the fifth bit of group g.
    fifth = _interleaved([_bits(high, group, 1) for group in range(8)]).reshape(-1, GROUP_SIZE)
    return low | (fifth << 4), *_k_scales(blocks), 0.0


def q6_k(blocks: Bytes) -> Unpacked:
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
MOST_EXPONENT = 251  # of an MXFP4 block, so that its largest code times its scale is finite in float32


def iq4_nl(blocks: Bytes) -> Unpacked:
    d = _half(blocks, 0)
    return _IQ4[_nibbles(_part(blocks, 2, 16))], d, -128 * d, 0.0


def iq4_xs(blocks: Bytes) -> Unpacked:
    low = (blocks[:, 4:8, None] >> np.array([0, 4], np.uint8)).reshape(-1, 8) & 15
    high = (blocks[:, 2:4, None] >> np.array([0, 2, 4, 6], np.uint8)).reshape(-1, 8) & 3
    scale = (_half(blocks, 0)[:, None] * ((low | high << 4).astype(np.float32) - 32)).reshape(-1)
    return _IQ4[_nibbles(_part(blocks, 8, 128).reshape(-1, 16))], scale, -128 * scale, 0.0


def mxfp4(blocks: Bytes) -> Unpacked:
    from gguf.quants import MXFP4  # late, as in `dequantized`

    exponent = blocks[:, 0]
    scale = np.where(exponent > MOST_EXPONENT, np.float32(np.nan), MXFP4.e8m0_to_fp32_half(exponent))
    return _FP4[_nibbles(_part(blocks, 1, 16))], scale, -12 * scale, 0.0
