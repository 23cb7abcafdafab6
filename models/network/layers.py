"""Weights of the decoder's layers, read from a checkpoint's parameters."""

import math
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from headrace.models.architectures.config import (
    DecoderConfig,
    ExpertsConfig,
    IndexerConfig,
    LayerConfig,
    MixerConfig,
    RopeConfig,
)
from headrace.models.network.latent import read_latent
from headrace.models.network.layer_inputs import read_input
from headrace.models.network.parameters import Parameters
from headrace.models.network.rope import make_rope
from headrace.models.network.tensors import (
    BRANCH_NORMS,
    attention,
    attention_gate,
    expert_stacks,
    feed_forward,
    indexer,
    mixer_gates,
    mixer_inputs,
    mixer_output,
    router,
    shared_gate,
)
from headrace.runtime.kv.cache import KVShape
from headrace.runtime.ops import (
    AttentionSpec,
    BlockChooser,
    BoundedSilu,
    BranchNorms,
    Curve,
    LayerWeights,
    MixerSizes,
    MixerSpec,
    Mixture,
    Rope,
    SmallValues,
    Weight,
    Xielu,
)
from headrace.runtime.ops.kv_format import KVFormat


def read_mixer(
    config: DecoderConfig, parameters: Parameters, prefix: str, mixer: MixerConfig
) -> tuple[MixerSpec, list[Weight], Weight]:
    """Return a layer's mixer, the projections into it, and the one out of it.

    Rows that a checkpoint has in another order than `MixerSizes` are put into that order: those of Mamba-2, with the
    channels of its convolution, and those that are stored by key head.
    """
    at = f"{prefix}.mixer"
    sizes = mixer.sizes
    inputs = mixer_inputs(config, mixer)
    output = parameters.tensor(prefix, mixer_output(config, mixer))
    taps, bias = _taps(parameters, at, mixer)
    if sizes.kind == "conv":
        spec = MixerSpec(sizes, taps=taps, tap_bias=bias)
        return spec, parameters.fused(prefix, inputs), output
    rate = -mx.exp(parameters.vector(f"{at}.A_log", sizes.heads).astype(mx.float32))
    step_bias = parameters.vector(f"{at}.dt_bias", sizes.decays)
    if sizes.kind != "ssm":
        norm = parameters.vector(f"{at}.norm.weight", sizes.value_dim)
        max_beta = mixer.most_beta
        spec = MixerSpec(sizes, taps, bias, rate, step_bias, mixer.decay_bound, max_beta, norm=norm, norm_eps=mixer.eps)
        stored_order = _by_key_head(sizes) if mixer.by_key_head else None
        return spec, parameters.fused(prefix, inputs, stored_order), output
    order = _as_queries(sizes)
    if bias is not None:
        bias = bias[order]
    spec = MixerSpec(
        sizes,
        taps=taps[:, order],
        tap_bias=bias,
        rate=rate,
        step_bias=step_bias,
        steps=mixer.steps,
        skip=parameters.vector(f"{at}.D", sizes.heads),
        norm=_norm(parameters, f"{at}.norm.weight", mixer),
        norm_first=False,
        norm_eps=mixer.eps,
    )
    # Stored are the rows [z | x, B, C | dt]. Wanted are [C, B, x | z | dt]: `order` counts from x on, after z.
    rows = inputs[0].rows
    turned = mx.concatenate([sizes.inner + order, mx.arange(sizes.inner), mx.arange(rows - sizes.heads, rows)])
    return spec, parameters.fused(prefix, inputs, turned), output


def read_gates(parameters: Parameters, prefix: str, mixer: MixerConfig) -> tuple[Weight, Weight] | None:
    """Return the second products to gates and decays, if they have two; see `LayerWeights.mixer_gates`."""
    gates = [parameters.tensor(prefix, tensor) for tensor in mixer_gates(mixer)]
    if not gates:
        return None
    gate, decay = gates
    return gate, decay


def _taps(parameters: Parameters, at: str, mixer: MixerConfig) -> tuple[mx.array, mx.array | None]:
    """Return the weight (width, C) of the convolution, and its bias, if any."""
    sizes = mixer.sizes
    if not mixer.apart:
        return parameters.taps(f"{at}.conv1d", sizes.channels, sizes.width)
    keys = sizes.key_heads * sizes.key_dim
    channels = {"q_conv1d": keys, "k_conv1d": keys, "v_conv1d": sizes.inner}
    taps = [parameters.taps(f"{at}.{name}", count, sizes.width) for name, count in channels.items()]
    return mx.concatenate([weight for weight, _ in taps], axis=1), None


def _norm(parameters: Parameters, name: str, mixer: MixerConfig) -> mx.array | None:
    """Return the norm of an "ssm" mixer: (Hv * Dv,), or (parts, Hv * Dv / parts) if parts are normalized alone."""
    if not mixer.norm_parts:
        return None
    weight = parameters.vector(name, mixer.sizes.inner)
    if mixer.norm_parts > 1:
        weight = weight.reshape(mixer.norm_parts, -1)
    return weight


def _as_queries(sizes: MixerSizes) -> mx.array:
    """Return the stored channel of each of [C, B, x], which are queries, keys and values; stored are [x, B, C]."""
    keys = sizes.key_heads * sizes.key_dim
    inner = sizes.inner
    return mx.concatenate([mx.arange(inner + keys, inner + 2 * keys), mx.arange(inner, inner + keys), mx.arange(inner)])


def _by_key_head(sizes: MixerSizes) -> mx.array:
    """Return the stored row of each of [q, k, v | z | b | a]; stored are q, k, v, z of each key head, then b, a."""
    key = sizes.key_dim
    value = sizes.inner // sizes.key_heads
    wide = mx.arange(sizes.channels + sizes.inner).reshape(sizes.key_heads, -1)
    # b and a are a matrix of their own: its rows count on from the first matrix's.
    narrow = wide.size + mx.arange(2 * sizes.heads).reshape(sizes.key_heads, -1)
    parts = [*mx.split(wide, [key, 2 * key, 2 * key + value], axis=1), *mx.split(narrow, 2, axis=1)]
    return mx.concatenate([part.flatten() for part in parts])


def read_layers(
    config: DecoderConfig, parameters: Parameters, indices: Sequence[int] | None = None
) -> list[LayerWeights]:
    """Return the weights of the layers in `indices` (None: all); layers of one kind share one rotation."""
    config = _without_lost_corrections(config, parameters)
    ropes: dict[RopeConfig | None, Rope | None] = {None: None}
    for layer in config.layers:
        if layer.rope is not None and layer.rope not in ropes:
            ropes[layer.rope] = make_rope(layer.rope, config.heads_of(layer)[1], config.context_length)
    if indices is None:
        indices = range(len(config.layers))
    layers = [(index, config.layers[index]) for index in indices]
    return [_layer(config, parameters, f"model.layers.{index}", layer, ropes[layer.rope]) for index, layer in layers]


def _without_lost_corrections(config: DecoderConfig, parameters: Parameters) -> DecoderConfig:
    """Return the config without corrections of routers, if the checkpoint has none and its conversion may lack them."""
    names = []
    layers = list(config.layers)
    for index, layer in enumerate(config.layers):
        if layer.experts is None:
            continue
        layers[index] = replace(layer, experts=replace(layer.experts, correction=None))
        if layer.experts.correction_lost:
            names.append(f"model.layers.{index}.mlp.{layer.experts.correction}")
    if not names or any(name in parameters for name in names):
        return config
    return replace(config, layers=tuple(layers))


def kv_shape_of(config: DecoderConfig, layers: list[LayerWeights], kv: KVFormat) -> KVShape:
    """Return the shape of the layers' K/V and recurrent state.

    The keys of each indexer are one more layer after all others, as `KVShape.index_keys_of` expects: one head, with
    half of a key stored as K and half as V.
    """
    indexers = {i: layer.own_indexer for i, layer in enumerate(config.layers) if layer.own_indexer is not None}
    count = len(layers) + len(indexers)
    sources = list(range(count))
    for index, layer in enumerate(config.layers):
        if layer.source is not None:
            sources[index] = layer.source
    mixers = {i: layer.mixer for i, layer in enumerate(layers) if layer.mixer is not None}
    return KVShape(
        count,
        config.kv_heads,
        config.head_dim,
        kv,
        (*(layer.window for layer in config.layers), *(None for _ in indexers)),
        recurrent=tuple(mixers),
        mixers=tuple(mixers.values()),
        without=tuple(i for i, layer in enumerate(layers) if layer.attention is None),
        heads=(
            *(config.stored_heads(layer) for layer in config.layers),
            *((1, sizes.head_dim // 2) for sizes in indexers.values()),
        ),
        sources=tuple(sources),
        indexed=tuple(indexers),
    )


def _layer(
    config: DecoderConfig, parameters: Parameters, prefix: str, layer: LayerConfig, rope: Rope | None
) -> LayerWeights:
    """Return the weights of one layer, which are taken out of `parameters`.

    `qkv` and `output` are attention's projections. In a layer with recurrence alone they are the mixer's; next to
    attention, the mixer has `mixer_ends`.
    """
    width = config.hidden_size
    attn = f"{prefix}.self_attn"
    norms: dict[str, mx.array] = {}

    def norm(name: str | None) -> mx.array | None:
        if name is None:
            return None
        if not config.family.norm_weights:
            return parameters.ones(width)
        if name not in norms:  # a parallel layer has one norm for both halves
            norms[name] = parameters.vector(f"{prefix}.{name}.weight", width, config.norm_weight_offset)
        return norms[name]

    def branch_norm(name: str | None) -> mx.array | None:
        """Return the norm of a branch's output, with the factor of the branch folded in."""
        weight = norm(name)
        if weight is None or config.branch_scale == 1.0:
            return weight
        return weight * config.branch_scale

    def norm_bias(name: str | None) -> mx.array | None:
        if name is None or not config.family.norm_bias:
            return None
        bias = f"{prefix}.{name}.bias"
        if bias not in norms:
            norms[bias] = parameters.vector(bias, width)
        return norms[bias]

    family = config.family
    names = family.norms_of(layer.attends)
    if not layer.feeds:
        names = replace(names, mlp=None)
    if not layer.attends and layer.mixer is None:
        names = replace(names, attention=None, after_attention=None)
    spec = None
    qkv: list[Weight] = []
    output = None
    latent = None
    gate = None
    mixer = None
    ends = None
    if layer.mixer is not None and not layer.attends:
        mixer, qkv, output = read_mixer(config, parameters, prefix, layer.mixer)
    elif not layer.attends:
        pass
    elif config.latent is not None:
        spec = _attention(config, parameters, attn, layer, rope)
        latent, qkv, output = read_latent(config, parameters, prefix, config.latent, layer)
        for tensor in attention_gate(config, layer):
            gate = parameters.tensor(prefix, tensor)
    else:
        spec = _attention(config, parameters, attn, layer, rope)
        qkv, gate, output = _projections(config, parameters, prefix, layer, rope)
        if layer.mixer is not None:
            mixer, [into], out = read_mixer(config, parameters, prefix, layer.mixer)
            ends = into, out
    mixer_gate_weights = None
    if layer.mixer is not None:
        mixer_gate_weights = read_gates(parameters, prefix, layer.mixer)
    gate_up = list[Weight]()
    down = None
    down_gate = None
    mixture = None
    branches = None
    if layer.experts is not None:
        mixture = _mixture(config, parameters, prefix, layer.experts)
        shared = shared_gate(config, layer.experts)
        if shared is not None:
            down_gate = parameters.router(prefix, shared)
        if layer.experts.branch:
            branches = BranchNorms(*(parameters.vector(f"{prefix}.{name}.weight", width) for name in BRANCH_NORMS))
    dense = feed_forward(config, layer)
    if dense:
        gate_up = parameters.fused(prefix, dense[:-1])  # the last tensor is the projection out
        down = parameters.tensor(prefix, dense[-1])
    own_input = None
    if config.input_size:
        own_input = read_input(config, parameters, prefix)
    scalar = None
    if family.scaled and f"{prefix}.layer_scalar" in parameters:
        scalar = parameters.vector(f"{prefix}.layer_scalar", 1)
    return LayerWeights(
        attention=spec,
        input_norm=norm(names.attention),
        input_norm_bias=norm_bias(names.attention),
        qkv=qkv,
        output=output,
        attention_post_norm=branch_norm(names.after_attention),
        mlp_norm=norm(names.mlp),
        mlp_norm_bias=norm_bias(names.mlp),
        gate_up=gate_up,
        down=down,
        mlp_post_norm=branch_norm(names.after_mlp),
        mixture=mixture,
        mixer=mixer,
        gate=gate,
        down_gate=down_gate,
        latent=latent,
        mixer_ends=ends,
        branches=branches,
        own_input=own_input,
        mixer_gates=mixer_gate_weights,
        scalar=scalar,
        head_norms=_head_norms(config, parameters, attn, layer, rope),
        curve=_curve(config, parameters, f"{prefix}.mlp.act_fn", layer),
        values=_values(config, layer),
    )


def _values(config: DecoderConfig, layer: LayerConfig) -> SmallValues | None:
    """Return the size of a layer's values, if it is not that of its keys."""
    if not layer.value_dim:
        return None
    return SmallValues(layer.value_dim, config.value_scale)


def _head_norms(
    config: DecoderConfig, parameters: Parameters, at: str, layer: LayerConfig, rope: Rope | None
) -> tuple[mx.array, mx.array] | None:
    """Return the weights of queries' and keys' LayerNorms, if they have some."""
    if config.family.qk_norm != "layer":
        return None
    kv_heads, dim = config.heads_of(layer)
    order = head_order(dim, rope) if config.family.interleaved else None
    counts = {"q_norm": config.query_heads(layer), "k_norm": kv_heads}
    q, k = (parameters.vector(f"{at}.{name}.weight", count * dim).reshape(-1, dim) for name, count in counts.items())
    return (q, k) if order is None else (q[:, order], k[:, order])


def _curve(config: DecoderConfig, parameters: Parameters, at: str, layer: LayerConfig) -> Curve | None:
    """Return a layer's activation, if it has numbers of its own."""
    if config.family.activation == "xielu":
        return _xielu(parameters, at)
    if layer.limit:
        return BoundedSilu(layer.limit)
    return None


def _xielu(parameters: Parameters, at: str) -> Xielu:
    """Return a layer's xIELU. Two of its numbers are stored before softplus."""
    defaults = {"alpha_p": None, "alpha_n": None, "beta": 0.5, "eps": -1e-6}
    positive, negative, beta, eps = (parameters.number(f"{at}.{name}", default) for name, default in defaults.items())
    # softplus, log(1 + e^x), in the form that cannot overflow
    positive, negative = (math.log1p(math.exp(-abs(x))) + max(x, 0.0) for x in (positive, negative))
    return Xielu(positive, beta + negative, beta, eps)


def _projections(
    config: DecoderConfig, parameters: Parameters, prefix: str, layer: LayerConfig, rope: Rope | None
) -> tuple[list[Weight], Weight | None, Weight]:
    """Return the projections into attention and into an indexer, its gate, if any, and the projection out of it."""
    *inputs, output = attention(config, layer)
    gate = None
    if config.family.gates == "joined":
        inputs[0], gate = parameters.gated(prefix, inputs[0], config.heads)
    for tensor in attention_gate(config, layer):
        gate = parameters.tensor(prefix, tensor)
    # After `gated`, which leaves the queries' rows for `fused`. An indexer's projections come last.
    qkv = parameters.fused(prefix, inputs, qkv_order(config, rope))
    qkv += [parameters.tensor(prefix, tensor) for tensor in indexer(config, layer)]
    return qkv, gate, parameters.tensor(prefix, output)


def _attention(
    config: DecoderConfig, parameters: Parameters, prefix: str, layer: LayerConfig, rope: Rope | None
) -> AttentionSpec:
    """Return the attention of a layer. Norms of heads are reordered as the rows of queries and keys (`head_order`)."""
    together = config.family.qk_norm == "heads"
    heads = config.query_heads(layer)
    kv_heads, head_dim = config.heads_of(layer)
    turns = None
    if config.family.interleaved:
        turns = head_order(head_dim, rope)

    def head_norm(name: str, heads: int) -> mx.array:
        size = head_dim * heads if together else head_dim
        weight = parameters.vector(f"{prefix}.{name}.weight", size, config.norm_weight_offset)
        if turns is not None:
            weight = weight.reshape(-1, head_dim)[:, turns].flatten()
        return weight

    q_norm = None
    k_norm = None
    if config.family.qk_norm in ("head", "heads"):
        q_norm = head_norm("q_norm", heads)
        if "k" in layer.projects:
            k_norm = head_norm("k_norm", kv_heads)
    sinks = None
    if layer.sinks:
        sinks = parameters.vector(f"{prefix}.sinks", heads)
    chosen = None
    chooser = None
    if layer.indexer is not None:
        chosen = layer.indexer.chosen
        if config.latent is None:
            chooser = _chooser(config, parameters, prefix, layer.indexer, rope)
    return AttentionSpec(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=config.attention_scale,
        rope=rope,
        q_norm=q_norm,
        k_norm=k_norm,
        norm_eps=config.norm_eps if config.head_eps is None else config.head_eps,
        window=layer.window,
        softcap=config.attention_softcap,
        sinks=sinks,
        norm_last=config.family.norm_last,
        growth=layer.growth,
        v_norm=config.family.v_norm,
        projects=layer.projects,
        chunked=layer.chunked,
        unit_norms=config.family.qk_norm == "unit" or (config.family.qk_norm == "turned_unit" and rope is not None),
        chosen=chosen,
        chooser=chooser,
    )


def _chooser(
    config: DecoderConfig, parameters: Parameters, prefix: str, sizes: IndexerConfig, rope: Rope | None
) -> BlockChooser:
    """Return the indexer of an attention without latents; its keys have one head, and no scale is applied to scores."""
    q_norm, k_norm = (
        parameters.vector(f"{prefix}.index_{part}_norm.weight", sizes.head_dim, config.norm_weight_offset)
        for part in ("q", "k")
    )
    heads = AttentionSpec(
        heads=sizes.heads,
        kv_heads=1,
        head_dim=sizes.head_dim,
        scale=1.0,
        rope=rope,
        q_norm=q_norm,
        k_norm=k_norm,
        norm_eps=config.norm_eps,
        projects="qk",
    )
    return BlockChooser(heads, sizes.block, sizes.local)


def head_order(head_dim: int, rope: Rope | None) -> mx.array | None:
    """Return the dimensions of a head (D,) with rotated neighbours apart by half of the rotated part; None as stored.

    Scores are sums over a head's dimensions, so that reordered queries and keys give the same ones.
    """
    if rope is None:
        return None
    turned = list(range(0, rope.dims, 2)) + list(range(1, rope.dims, 2))
    return mx.array(turned + list(range(rope.dims, head_dim)))


def qkv_order(config: DecoderConfig, rope: Rope | None) -> mx.array | None:
    """Return the rows of the stacked projections in that order, ((H + 2 Hkv) * D,); None: as stored."""
    if config.family.by_kv_head:
        shared = config.heads // config.kv_heads
        rows = mx.arange((config.heads + 2 * config.kv_heads) * config.head_dim)
        # Stored for each K/V head: the queries that share it, its key, its value.
        by_head = rows.reshape(config.kv_heads, shared + 2, -1)
        return mx.concatenate([part.flatten() for part in mx.split(by_head, [shared, shared + 1], axis=1)])
    if not config.family.interleaved:
        return None
    order = head_order(config.head_dim, rope)
    if order is None:
        return None
    heads = mx.arange(config.heads + config.kv_heads)[:, None] * config.head_dim + order
    values = mx.arange(
        (config.heads + config.kv_heads) * config.head_dim, (config.heads + 2 * config.kv_heads) * config.head_dim
    )
    return mx.concatenate([heads.flatten(), values])


def _mixture(config: DecoderConfig, parameters: Parameters, prefix: str, experts: ExpertsConfig) -> Mixture:
    width = config.hidden_size
    mlp = f"{prefix}.mlp"
    # One stack into the experts has no gate; of two, the first is the gate's.
    *before, after = expert_stacks(config, experts)
    inputs = [parameters.stack(prefix, tensor) for tensor in before]
    gate: Weight | None = None
    up: Weight | None = inputs[-1]
    if len(inputs) > 1:
        gate, up = parameters.ops.join_experts(*inputs)
    correction = None
    if experts.correction is not None:
        correction = parameters.vector(f"{mlp}.{experts.correction}", experts.count, dtype=mx.float32)
        if experts.excludes:  # experts of groups that are left out rank 0, now below all others
            correction = correction - correction.min()
    curve = None
    if experts.limit:
        curve = BoundedSilu(experts.limit)
    norm = None
    scale = None
    if experts.branch:
        # The router's input has a factor of E^-0.5, which its norm takes in.
        norm = parameters.vector(f"{mlp}.router_norm.weight", width) * width**-0.5
        scale = parameters.vector(f"{mlp}.expert_scale", experts.count)
    return Mixture(
        router=parameters.router(prefix, router(config, experts)),
        gate=gate,
        up=up,
        down=parameters.stack(prefix, after),
        active=experts.active,
        normalized=experts.normalized,
        sigmoid=experts.sigmoid,
        correction=correction,
        scale=experts.scale,
        groups=experts.groups,
        router_norm=norm,
        expert_scale=scale,
        residual=config.family.adds_experts and not experts.branch,
        best=experts.best,
        shares_first=experts.shares_first,
        curve=curve,
        band=experts.band,
    )
