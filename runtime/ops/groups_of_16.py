"""Weights in affine groups of 16, which GGUF's Q6_K is made of: MLX has none smaller than 32 in this mode.

The native kernels read them as they are. Everywhere else they become 8-bit weights in groups of 32, from their exact
values.
"""

import mlx.core as mx

from headrace.runtime.ops.weights import Weight

GROUP, BITS = 16, 6  # the one width there is in such groups
BECOMES_BITS, BECOMES_GROUP = 8, 32


def dequantized(data: mx.array, scales: mx.array, biases: mx.array) -> mx.array:
    """data (..., K * 6 / 32) uint32, scales and biases (..., K / 16) -> w = scale * q + bias (..., K), float32."""
    three = data.view(mx.uint8).reshape(*data.shape[:-1], -1, 3)  # bytes of four codes, the first in the lowest bits
    a, b, c = (three[..., i] for i in range(3))
    codes = mx.stack([a & 63, (a >> 6) | ((b & 15) << 2), (b >> 4) | ((c & 3) << 4), c >> 2], axis=-1)
    groups = codes.reshape(*scales.shape, GROUP).astype(mx.float32)
    values = groups * scales.astype(mx.float32)[..., None] + biases.astype(mx.float32)[..., None]
    return values.reshape(*scales.shape[:-1], -1)


def requantized(data: mx.array, scales: mx.array, biases: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """The same matrix in 8 bits and groups of 32, lazily: off by at most half a step of 1/255 of a group's range."""
    words, steps, offsets = mx.quantize(dequantized(data, scales, biases), group_size=BECOMES_GROUP, bits=BECOMES_BITS)
    return words, steps, offsets


def without(weight: Weight) -> Weight:
    """A weight that stock MLX can multiply with: the given one, unless it is in groups of 16."""
    if weight.group_size != GROUP or weight.scales is None or weight.biases is None:
        return weight
    words, scales, biases = requantized(weight.data, weight.scales, weight.biases)
    return Weight(words, scales, biases, BECOMES_BITS, BECOMES_GROUP, weight.bias)
