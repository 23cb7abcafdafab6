"""Ternary layers of mlx-lm (BitNet) as affine 2-bit layers, for devices without Metal.

mlx-lm multiplies packed ternary weights in a Metal kernel only. Weights w in {-1, 0, 1} with one scale s are s (w + 1)
- s: affine groups with codes w + 1, scale s and offset -s, without rounding.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

_GROUPS = (128, 64, 32)
_BITS, _PER_WORD = 2, 16
_PER_BYTE = 4


def to_affine(model: Any) -> None:
    """Exchange all ternary layers of a model whose rows divide into groups. Evaluates nothing."""
    from mlx_lm.models.bitlinear_layers import BitLinear

    found = [(path, module) for path, module in model.named_modules() if type(module) is BitLinear]
    layers = [(path, _affine(module)) for path, module in found if module.in_features % _GROUPS[-1] == 0]
    model.update_modules(tree_unflatten(layers))


def _affine(layer: Any) -> nn.QuantizedLinear:
    rows, columns = layer.out_features, layer.in_features
    group = next(size for size in _GROUPS if columns % size == 0)
    # (N / 4, K): two bits at 2 i of row r are row r + i N / 4.
    codes = mx.concatenate([(layer.weight >> (2 * i)) & 3 for i in range(_PER_BYTE)])
    words = codes.reshape(rows, columns // _PER_WORD, _PER_WORD).astype(mx.uint32)
    scale = 1 / layer.weight_scale if layer.invert_weight_scales else layer.weight_scale
    affine = nn.QuantizedLinear(columns, rows, bias=layer.bias is not None, group_size=group, bits=_BITS)
    affine.weight = (words << (_BITS * mx.arange(_PER_WORD, dtype=mx.uint32))).sum(axis=-1)
    affine.scales = mx.broadcast_to(scale, (rows, columns // group))
    affine.biases = -affine.scales
    if layer.bias is not None:
        affine.bias = layer.bias
    return affine
