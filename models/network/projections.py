"""Projections of one input, with the norms before and behind them."""

import mlx.core as mx

from headrace.runtime.ops import LayerWeights, Ops, Projections, Weight


def stacked(projected: Projections) -> mx.array:
    """Return projections as one array."""
    return projected if isinstance(projected, mx.array) else mx.concatenate(projected, axis=-1)


def project(ops: Ops, x: mx.array, norm: mx.array | None, eps: float, weights: list[Weight]) -> Projections:
    """Normalize, if there is a norm, and project x, in one operation if the projections are stacked."""
    if len(weights) == 1 and norm is not None:
        return ops.norm_linear(x, norm, eps, weights[0])
    x = x if norm is None else ops.rms_norm(x, norm, eps)
    projected = [ops.linear(x, weight) for weight in weights]
    return projected if len(projected) > 1 else projected[0]


def with_gates(ops: Ops, x: mx.array, layer: LayerWeights) -> mx.array:
    """Return a mixer's projected rows with all gates and decays; see `LayerWeights.mixer_gates`."""
    if layer.mixer_gates is None or layer.mixer is None:
        return x
    gate, decay = layer.mixer_gates
    at = layer.mixer.sizes.channels
    mixed, z, a, b = mx.split(x, [at, at + gate.columns, at + gate.columns + decay.columns], axis=-1)
    return mx.concatenate([mixed, ops.linear(mx.contiguous(z), gate), b, ops.linear(mx.contiguous(a), decay)], axis=-1)


def add_projected(
    ops: Ops, residual: mx.array, x: mx.array, weight: Weight, post_norm: mx.array | None, eps: float
) -> mx.array:
    """Project a block's result and add it to the residual stream, after the block's second norm, if any."""
    if post_norm is None:
        return ops.linear_add(x, weight, residual)
    return residual + ops.rms_norm(ops.linear(x, weight), post_norm, eps)
