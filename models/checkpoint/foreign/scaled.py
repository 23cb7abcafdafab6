"""8-bit floats (E4M3) and integers with a scale per tensor, channel, group or block: W = scale * (q - zero).

`checkpoint/arrays.py` calls it for matrices of the layout "scaled".

Guard: tests/models/checkpoint/test_foreign.py.
"""

from collections.abc import Sequence

import mlx.core as mx


def dequantize(data: mx.array, scales: mx.array, zeros: mx.array | None, blocks: Sequence[int]) -> mx.array:
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
