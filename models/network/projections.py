"""Projections of one input, with the norms before and behind them."""

import mlx.core as mx

from headrace.runtime.ops import Ops, Projections, Weight


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


def add_projected(
    ops: Ops, residual: mx.array, x: mx.array, weight: Weight, post_norm: mx.array | None, eps: float
) -> mx.array:
    """Project a block's result and add it to the residual stream, after the block's second norm, if any."""
    if post_norm is None:
        return ops.linear_add(x, weight, residual)
    return residual + ops.rms_norm(ops.linear(x, weight), post_norm, eps)
