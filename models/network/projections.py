"""Projections of the residual stream, with the norms before and behind them."""

from typing import NamedTuple

import mlx.core as mx

from headrace.models.architectures.config import DecoderConfig
from headrace.runtime.ops import LayerWeights, Ops, Projections, Weight


class Residual(NamedTuple):
    """The residual stream (B, T, E), and its norm for the next projection if the last addition gave it."""

    x: mx.array
    normed: mx.array | None = None


class Ends(NamedTuple):
    """Steps behind a sum: a norm of it for the next projection, and before that a factor (1,)."""

    norm: mx.array | None = None
    scalar: mx.array | None = None


def stacked(projected: Projections) -> mx.array:
    """Return projections as one array."""
    return projected if isinstance(projected, mx.array) else mx.concatenate(projected, axis=-1)


def project(ops: Ops, at: Residual, norm: mx.array | None, eps: float, weights: list[Weight]) -> Projections:
    """Normalize, if there is a norm, and project, in one operation if the projections are stacked."""
    x, norm = (at.x, norm) if at.normed is None else (at.normed, None)
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
    ops: Ops, to: mx.array, x: mx.array, weight: Weight, post_norm: mx.array | None, eps: float, ends: Ends
) -> Residual:
    """Project a block's result and add it to the residual stream, after the block's second norm, if any."""
    return Residual(*ops.linear_add_norm(x, weight, to, post_norm, ends.norm, eps, ends.scalar))


def add_experts(
    ops: Ops, at: Residual, layer: LayerWeights, dense: mx.array | None, config: DecoderConfig, ends: Ends
) -> Residual:
    """Add the output of a layer's experts, and that of its dense feed-forward (B, T, F) beside them, if any."""
    eps = config.norm_eps
    activation = config.family.activation
    branches = layer.branches
    assert layer.mlp_norm is not None
    assert layer.mixture is not None
    dense = dense if dense is None else gated(ops, at, layer, dense, eps)
    if branches is None or dense is None or layer.down is None:
        x = ops.experts(at.x, layer.mlp_norm, eps, layer.mixture, activation, at.normed)
        if dense is None or layer.down is None:
            return Residual(x if ends.scalar is None else x * ends.scalar)
        return add_projected(ops, x, dense, layer.down, None, eps, ends)
    own = ops.experts(at.x, branches.before_experts, eps, layer.mixture, activation)
    own = ops.rms_norm(own, branches.after_experts, eps)
    both = add_projected(ops, own, dense, layer.down, branches.after_dense, eps, Ends()).x
    return Residual(*ops.add_norms(both, at.x, layer.mlp_post_norm, ends.norm, eps, ends.scalar))


def gated(ops: Ops, at: Residual, layer: LayerWeights, dense: mx.array, eps: float) -> mx.array:
    """Multiply the dense feed-forward's inner values by its gate, if it has one."""
    if layer.down_gate is None:
        return dense
    return dense * mx.sigmoid(stacked(project(ops, at, layer.mlp_norm, eps, [layer.down_gate])))
