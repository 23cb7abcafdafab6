"""Affine weights in groups of 16 (GGUF's Q6_K), converted to 8 bits in groups of 32 for stock MLX.

MLX's affine mode has no groups below 32. The native kernels read groups of 16 directly. `reference.prepare` calls
`regrouped` for every weight as it is loaded.

Guards: tests/models/gguf/test_tensors.py and test_k_quants.py.
"""

import mlx.core as mx

from headrace.runtime.ops.weights import Weight

GROUP = 16  # values of a group, as stored
BITS = 6  # of a code, as stored
NEW_BITS = 8  # more than before, since two groups become one of a wider range
NEW_GROUP = 32  # the smallest group of MLX's affine mode


def dequantized(data: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
    """Return w = scale * q + bias (..., K) in float32. data (..., K * 6 / 32) uint32, scales, biases (..., K / 16)."""
    three = data.view(mx.uint8).reshape(*data.shape[:-1], -1, 3)  # the bytes of four codes, lowest bits first
    a, b, c = (three[..., i] for i in range(3))
    # Codes of 6 bits: the low 6 of a; the high 2 of a and low 4 of b; the high 4 of b and low 2 of c; the high 6 of c.
    codes = mx.stack([a & 63, (a >> 6) | ((b & 15) << 2), (b >> 4) | ((c & 3) << 4), c >> 2], axis=-1)
    groups = codes.reshape(*scales.shape, GROUP).astype(mx.float32)
    values = groups * scales.astype(mx.float32)[..., None] + biases.astype(mx.float32)[..., None]
    return values.reshape(*scales.shape[:-1], -1)


def requantized(data: mx.array, scales: mx.array, biases: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Return the matrix in 8 bits and groups of 32, lazily. The error is at most 1/510 of a group's range."""
    words, steps, offsets = mx.quantize(dequantized(data, scales, biases), group_size=NEW_GROUP, bits=NEW_BITS)
    return words, steps, offsets


def regrouped(weight: Weight) -> Weight:
    """Return a weight that stock MLX can multiply: the given one, unless it is in groups of 16."""
    if weight.group_size != GROUP or weight.scales is None or weight.biases is None:
        return weight
    words, scales, biases = requantized(weight.data, weight.scales, weight.biases)
    return Weight(words, scales, biases, NEW_BITS, NEW_GROUP, weight.bias)
