"""Weights of a layer's dense feed-forward, its experts and its activation, read from a checkpoint's parameters.

`layers` calls `with_feed_forward` and `with_experts`, and explains the parameters of all functions;
`models.network.tensors` has the names and sizes of the matrices.

Guard: tests/parity/test_mlx_lm_families.py, which compares logits with those of mlx-lm's classes.
"""

import math

import mlx.core as mx
from msgspec.structs import replace

from headrace.models.architectures.config import DecoderConfig, ExpertsConfig, LayerConfig
from headrace.models.network.parameters import Parameters
from headrace.models.network.tensors import (
    BRANCH_NORMS,
    LATENT_NORM,
    expert_latents,
    expert_stacks,
    feed_forward,
    router,
    shared_gate,
)
from headrace.runtime.ops import (
    BoundedSilu,
    BranchNorms,
    Curve,
    LatentExperts,
    LayerWeights,
    Mixture,
    SituGate,
    SparseGelu,
    Weight,
    Xielu,
)


def with_feed_forward(
    weights: LayerWeights, config: DecoderConfig, parameters: Parameters, prefix: str, layer: LayerConfig
) -> LayerWeights:
    """Add the dense feed-forward, or the expert that all tokens use, and the layer's own activation, if any."""
    weights = replace(weights, curve=_curve(config, parameters, f"{prefix}.mlp.act_fn", layer))
    dense = feed_forward(config, layer)
    if not dense:
        return weights
    *inputs, output = dense
    return replace(weights, gate_up=parameters.fused(prefix, inputs), down=parameters.tensor(prefix, output))


def _curve(config: DecoderConfig, parameters: Parameters, at: str, layer: LayerConfig) -> Curve | None:
    """Return a layer's activation, if it has numbers of its own."""
    if config.family.activation == "xielu":
        return _xielu(parameters, at)
    if layer.cutoff is not None:
        return SparseGelu(layer.cutoff)
    return _bounded(config, layer.limit)


def _xielu(parameters: Parameters, at: str) -> Xielu:
    """Return a layer's xIELU. Two of its numbers are stored before softplus."""
    defaults = {"alpha_p": None, "alpha_n": None, "beta": 0.5, "eps": -1e-6}
    positive, negative, beta, eps = (parameters.number(f"{at}.{name}", default) for name, default in defaults.items())
    # softplus, log(1 + e^x), in the form that cannot overflow
    positive, negative = (math.log1p(math.exp(-abs(x))) + max(x, 0.0) for x in (positive, negative))
    return Xielu(positive, beta + negative, beta, eps)


def with_experts(
    weights: LayerWeights, config: DecoderConfig, parameters: Parameters, prefix: str, experts: ExpertsConfig
) -> LayerWeights:
    """Add a mixture, the gate of its shared expert, and the norms of two branches (Gemma 4)."""
    mixture = _mixture(config, parameters, prefix, experts)
    down_gate = None
    shared = shared_gate(config, experts)
    if shared is not None:
        down_gate = parameters.router(prefix, shared)
    branches = None
    if experts.branch:
        branches = BranchNorms(
            *(parameters.vector(f"{prefix}.{name}.weight", config.hidden_size) for name in BRANCH_NORMS)
        )
    return replace(weights, mixture=mixture, down_gate=down_gate, branches=branches)


def _mixture(config: DecoderConfig, parameters: Parameters, prefix: str, experts: ExpertsConfig) -> Mixture:
    """Return a layer's routed experts."""
    width = config.hidden_size
    mlp = f"{prefix}.mlp"

    # One stack into the experts has no gate; of two, the first is the gate's.
    *stacks_in, stack_out = expert_stacks(config, experts)
    inputs = [parameters.stack(prefix, tensor) for tensor in stacks_in]
    gate: Weight | None = None
    up: Weight | None = inputs[-1]
    if len(inputs) > 1:
        gate, up = parameters.ops.join_experts(*inputs)

    # Vectors of the router
    correction = None
    if experts.correction is not None:
        correction = parameters.vector(f"{mlp}.{experts.correction}", experts.count, dtype=mx.float32)
        if experts.excludes:  # experts of groups that are left out rank 0, now below all others
            correction = correction - correction.min()
    norm = None
    scale = None
    if experts.branch:
        # The router's input has a factor of E^-0.5, which its norm takes in.
        norm = parameters.vector(f"{mlp}.router_norm.weight", width) * width**-0.5
        scale = parameters.vector(f"{mlp}.expert_scale", experts.count)

    mixture = Mixture(
        routing=experts,
        router=parameters.router(prefix, router(config, experts)),
        gate=gate,
        up=up,
        down=parameters.stack(prefix, stack_out),
        correction=correction,
        router_norm=norm,
        expert_scale=scale,
        residual=config.family.adds_experts and not (experts.branch or experts.weighs_both or config.block_layers),
        curve=_bounded(config, experts.limit),
        latent=_latent_experts(config, parameters, prefix, experts),
    )
    parameters.refuse_factors(mixture.matrices)
    return mixture


def _latent_experts(
    config: DecoderConfig, parameters: Parameters, prefix: str, experts: ExpertsConfig
) -> LatentExperts | None:
    """Return the projections around experts that have a width of their own."""
    projections = [parameters.tensor(prefix, tensor) for tensor in expert_latents(config, experts)]
    if not projections:
        return None
    into, out = projections
    norm = None
    if experts.latent_norm:
        norm = parameters.vector(f"{prefix}.{LATENT_NORM}", experts.latent)
    return LatentExperts(into, out, norm, config.norm_eps)


def _bounded(config: DecoderConfig, limit: float) -> Curve | None:
    """Return the activation with bounds of a feed-forward or of experts, if they have some. limit: 0 for none."""
    if config.soft_bounds is not None:
        return SituGate(*config.soft_bounds)
    if limit:
        return BoundedSilu(limit)
    return None
