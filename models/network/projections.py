"""Projections from and to the residual stream, with the norms before and after them: steps of `Decoder._block`.

Functions take the operations `ops` first; `residual` is the residual stream, `layer` the weights of the layer, `eps`
that of its norms.

Dimensions: B sequences, T new tokens, E hidden size, H query heads, Hkv key-value heads, D head size.

tests/parity/test_mlx_lm_families.py compares logits.
"""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
from msgspec import Struct

from headrace.models.architectures.config import DecoderConfig
from headrace.runtime.kv.cache import PassRow
from headrace.runtime.ops import (
    AttentionSpec,
    LayerWeights,
    LoopGate,
    Ops,
    Projections,
    SmallValues,
    Weight,
)


class Residual(Struct, frozen=True, eq=False):
    """The residual stream (B, T, E).

    normed: its norm for the next projection, if the last addition gave it.
    entered: the stream at the layer's begin, for a router that reads it.
    """

    x: mx.array
    normed: mx.array | None = None
    entered: mx.array | None = None


class Epilogue(Struct, frozen=True, eq=False):
    """Steps after a sum, in one operation with it where there is one: a factor (1,), then a norm for the next."""

    norm: mx.array | None = None
    scalar: mx.array | None = None


class Product(NamedTuple):
    """The result of attention, of a mixer or of a feed-forward (B, T, K), and its projection to the residual stream."""

    x: mx.array
    weight: Weight


def stacked(projected: Projections) -> mx.array:
    """Return projections as one array."""
    return mx.concatenate(projected, axis=-1)


def project(ops: Ops, residual: Residual, norm: mx.array | None, eps: float, weights: list[Weight]) -> Projections:
    """Normalize, if there is a norm, and project, in one operation if the projections are stacked."""
    x = residual.x
    if residual.normed is not None:  # the addition before has normalized it
        x = residual.normed
        norm = None
    if len(weights) == 1 and norm is not None:
        return [ops.norm_linear(x, norm, eps, weights[0])]
    if norm is not None:
        x = ops.rms_norm(x, norm, eps)
    return [ops.linear(x, weight) for weight in weights]


def with_gates(ops: Ops, x: mx.array, layer: LayerWeights) -> mx.array:
    """Return a mixer's projected rows with all gates and decays; see `LayerWeights.mixer_gates`."""
    if layer.mixer_gates is None or layer.mixer is None:
        return x
    gate, decay = layer.mixer_gates
    sizes = layer.mixer.sizes
    z_start = sizes.channels
    z_size = sizes.inner if gate is None else gate.columns
    a_start = z_start + z_size
    mixed, z, a, b = mx.split(x, [z_start, a_start, a_start + decay.columns], axis=-1)  # [q, k, v | z | a | b]
    if gate is not None:
        z = ops.linear(mx.contiguous(z), gate)
    return mx.concatenate([mixed, z, b, ops.linear(mx.contiguous(a), decay)], axis=-1)


def normed_heads(ops: Ops, projected: Projections, norms: tuple[mx.array, mx.array], eps: float) -> Projections:
    """Return projections with LayerNorms of queries and keys. norms: weights of each head (H, D), (Hkv, D)."""
    q_norm, k_norm = norms
    q, k, v = mx.split(stacked(projected), [q_norm.size, q_norm.size + k_norm.size], axis=-1)
    ones = mx.ones(q_norm.shape[-1:], q_norm.dtype)
    normed = [
        (ops.layer_norm(part.reshape(*part.shape[:2], *norm.shape), ones, None, eps) * norm).reshape(part.shape)
        for part, norm in ((q, q_norm), (k, k_norm))
    ]
    return [*normed, v]


def with_whole_values(projected: Projections, values: SmallValues, spec: AttentionSpec) -> Projections:
    """Return projections with values of the size of keys, zeros after each; as one array, or three, as they were."""
    *parts, last = projected
    count = spec.kv_heads * values.size
    small = last[..., -count:].reshape(*last.shape[:2], spec.kv_heads, values.size)
    whole = mx.pad(small * values.scale, [*[(0, 0)] * 3, (0, spec.head_dim - values.size)]).flatten(2)
    if parts:
        return [*parts, whole]
    return [mx.concatenate([last[..., :-count], whole], axis=-1)]


def of_small_values(heads: mx.array, values: SmallValues, spec: AttentionSpec) -> mx.array:
    """Return attended heads (B, T, H * D) without what zeros gave, (B, T, H * size)."""
    return heads.reshape(*heads.shape[:2], spec.heads, spec.head_dim)[..., : values.size].flatten(2)


def gated_heads(ops: Ops, gate: mx.array, heads: mx.array, kind: str | None) -> mx.array:
    """Multiply heads (B, T, H * D) by gates, for each number or for each head. kind: see `Family.gates`."""
    if gate.shape == heads.shape:
        return ops.glu(gate, heads, "sigmoid")
    wide = gate.astype(mx.float32)
    if kind == "head_softplus":
        factors = mx.logaddexp(wide, 0)  # (B, T, H)
    else:
        factors = mx.sigmoid(wide)
    return (heads.reshape(*gate.shape, -1) * factors[..., None].astype(heads.dtype)).reshape(heads.shape)


def loop_gates(ops: Ops, queries: mx.array, gate: LoopGate, rows: Sequence[PassRow]) -> mx.array:
    """Return the share of the first loop's entries in each head, (1, N, H, 1), by the rotated queries (1, N, H * D)."""
    assert gate.first.rope is not None
    turned = []
    begin = 0
    for row in rows:
        heads = queries[:, begin : begin + row.count].reshape(1, row.count, *gate.weight.shape)
        turned.append(ops.rotate_heads(heads.swapaxes(1, 2), gate.first.rope, row.cache.length))  # (1, H, T, D)
        begin += row.count
    scores = (mx.concatenate(turned, axis=2) * gate.weight[:, None]).sum(axis=-1) + gate.bias[:, None]  # (1, H, N)
    return mx.sigmoid(scores).swapaxes(1, 2)[..., None]


def add_products(
    ops: Ops, x: mx.array, products: list[Product], post_norm: mx.array | None, eps: float, epilogue: Epilogue
) -> Residual:
    """Project results and add them to the residual stream.

    x: the residual stream (B, T, E).
    products: one after the other; `post_norm` is of the last.
    epilogue: steps after the sum.
    """
    *first, (result, weight) = products
    for product in first:
        x = ops.linear_add(product.x, product.weight, x)
    return Residual(*ops.linear_add_norm(result, weight, x, post_norm, epilogue.norm, eps, epilogue.scalar))


def add_experts(
    ops: Ops, residual: Residual, layer: LayerWeights, dense: Product | None, config: DecoderConfig, epilogue: Epilogue
) -> Residual:
    """Add the output of a layer's experts to the residual stream.

    dense: the dense feed-forward next to them, if any.
    epilogue: steps after the sum.
    """
    eps = config.norm_eps
    activation = config.family.activation
    branches = layer.branches
    assert layer.mlp_norm is not None
    assert layer.mixture is not None
    experts_factor = None
    if dense is not None:
        dense, experts_factor = gated(ops, residual, layer, dense, eps)

    # Experts, and a shared expert next to them, with one norm before and at most one after both
    if branches is None or dense is None:
        x = experts_output(ops, residual, layer, config)
        if experts_factor is not None:
            x = residual.x + x * experts_factor
        elif config.family.norm == "layer":
            x = residual.x + x
        if layer.mlp_post_norm is not None:  # of the experts' output, which the shared expert's is a part of
            if dense is not None:
                x = ops.linear_add(dense.x, dense.weight, x)
            return Residual(*ops.add_norms(x, residual.x, layer.mlp_post_norm, epilogue.norm, eps, epilogue.scalar))
        if dense is None:
            return scaled(x, epilogue)
        return add_products(ops, x, [dense], None, eps, epilogue)

    # Two branches, each with norms of its own (Gemma 4)
    expert_output = ops.experts(residual.x, branches.before_experts, eps, layer.mixture, activation)
    expert_output = ops.rms_norm(expert_output, branches.after_experts, eps)
    both = add_products(ops, expert_output, [dense], branches.after_dense, eps, Epilogue()).x
    return Residual(*ops.add_norms(both, residual.x, layer.mlp_post_norm, epilogue.norm, eps, epilogue.scalar))


def experts_output(ops: Ops, residual: Residual, layer: LayerWeights, config: DecoderConfig) -> mx.array:
    """Return the output of a layer's experts; see `Mixture.residual`."""
    x = residual.x
    assert layer.mlp_norm is not None
    assert layer.mixture is not None
    if config.family.norm == "layer" and residual.normed is not None and layer.mlp_norm_bias is None:
        # LayerNorm without a bias is RMSNorm of the centred stream, and with that the kernels' node begins.
        x = x - x.mean(axis=-1, keepdims=True)
    parts = (layer.mlp_norm, config.norm_eps, layer.mixture, config.family.activation)
    return ops.experts(x, *parts, residual.normed, residual.entered)


def scaled(x: mx.array, epilogue: Epilogue) -> Residual:
    """Return a sum times its factor, if it has one. The norm that follows is left to the next projection."""
    if epilogue.scalar is not None:
        x = x * epilogue.scalar
    return Residual(x)


def gated(
    ops: Ops, residual: Residual, layer: LayerWeights, dense: Product, eps: float
) -> tuple[Product, mx.array | None]:
    """Multiply the dense feed-forward's inner values (B, T, F) by its gate, if it has one.

    Also returns the factor (B, T, 1) of the experts' output, if one softmax weighs both.
    """
    if layer.down_gate is None:
        return dense, None
    gate = stacked(project(ops, residual, layer.mlp_norm, eps, [layer.down_gate]))
    if layer.down_gate.rows == 1:
        return dense._replace(x=dense.x * mx.sigmoid(gate)), None
    of_experts, of_dense = mx.split(mx.softmax(gate, axis=-1, precise=True), 2, axis=-1)
    return dense._replace(x=dense.x * of_dense), of_experts
