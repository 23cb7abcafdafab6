"""Weights of the decoder's layers, read from a checkpoint's parameters.

`Decoder` calls `read_layers` and `kv_shape_of`. `models.network.tensors` has the names and sizes of all matrices; here
their rows are put into the order of the operations, and configurations become the specs of `runtime.ops`.

The order of this file: the layer as a whole (`read_layers`, `_layer`), then attention. `mixers` has recurrent mixing,
`feed_forwards` feed-forwards and experts. tests/parity/test_mlx_lm_families.py compares logits, which a row in another
order changes.

Functions here, in `mixers`, `feed_forwards` and `latent` have these parameters:

    config       of the decoder
    parameters   weights of the checkpoint; each is taken out of it
    prefix       of the layer's tensors: "model.layers.3"; `at` is that of one of its modules
    layer        the layer's configuration; `mixer`, `experts`, `latent` are parts of it
    weights      of the layer so far; a copy with more of them is returned
    rope         rotation of its heads; None without

Dimensions: E hidden size, H query heads, Hkv key-value heads, D head size.
"""

import math
from collections.abc import Sequence
from itertools import accumulate

import mlx.core as mx
from msgspec.structs import replace

from headrace.models.architectures.config import (
    AltUpConfig,
    DecoderConfig,
    IndexerConfig,
    LayerConfig,
    RopeConfig,
)
from headrace.models.network.feed_forwards import with_experts, with_feed_forward
from headrace.models.network.latent import read_latent
from headrace.models.network.layer_inputs import read_input
from headrace.models.network.mixers import with_mixer
from headrace.models.network.parameters import Parameters
from headrace.models.network.rope import make_rope, neighbours_apart
from headrace.models.network.tensors import (
    RESIDUAL_MIXES,
    altup_layer,
    attention,
    attention_gate,
    indexer,
    inner_norms,
)
from headrace.runtime.kv.cache import KVShape
from headrace.runtime.ops import (
    AltUpWeights,
    AttentionSpec,
    BlockChooser,
    LayerWeights,
    LoopGate,
    ResidualMix,
    Rope,
    SmallValues,
    Weight,
)
from headrace.runtime.ops.kv_format import KVFormat


def read_layers(
    config: DecoderConfig, parameters: Parameters, indices: Sequence[int] | None = None
) -> list[LayerWeights]:
    """Return the weights of the stored layers in `indices` (None: all); layers of one kind share one rotation."""
    config = _without_lost_corrections(config, parameters)
    ropes: dict[RopeConfig | None, Rope | None] = {None: None}
    for layer in config.layers:
        if layer.rope is not None and layer.rope not in ropes:
            _, head_dim = config.heads_of(layer)
            ropes[layer.rope] = make_rope(layer.rope, head_dim, config.context_length)
    if indices is None:
        indices = range(len(config.stored))
    weights = []
    for index in indices:
        layer = config.layers[index]
        weights.append(_layer(config, parameters, f"model.layers.{index}", layer, ropes[layer.rope]))
    return weights


def in_every_loop(config: DecoderConfig, stored: list[LayerWeights]) -> list[LayerWeights]:
    """Return the layers of all loops: their weights are the same, their windows as configured.

    stored: the layers that a checkpoint has. Their gates, if any, are of the loops after the first.
    """
    if config.loops == 1:
        return stored
    layers = []
    for index, layer in enumerate(config.layers):
        weights = stored[index % len(stored)]
        if index < len(stored):
            weights = replace(weights, loop_gate=None)
        spec = weights.attention
        if spec is not None and spec.window != layer.window:
            weights = replace(weights, attention=replace(spec, window=layer.window))
        layers.append(weights)
    return layers


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

    Further states of a layer are layers after all others (`later_states`). The keys of each indexer are one more layer
    after those, as `KVShape.index_keys_of` expects: one head, with half of a key stored as K and half as V.
    """
    # Their indices: the layers themselves, then further states, then keys of indexers.
    indexers = {i: layer.own_indexer for i, layer in enumerate(config.layers) if layer.own_indexer is not None}
    later = [mixer for layer in layers for mixer in layer.later_mixers]
    stateful = range(len(layers), len(layers) + len(later))
    count = stateful.stop + len(indexers)
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
        (*(layer.window for layer in config.layers), *(None for _ in (*later, *indexers))),
        recurrent=(*mixers, *stateful),
        mixers=(*mixers.values(), *later),
        layers_without_kv=(*(i for i, layer in enumerate(layers) if layer.attention is None), *stateful),
        heads=(
            *(config.stored_heads(layer) for layer in config.layers),
            *((0, 0) for _ in later),
            *((1, sizes.head_dim // 2) for sizes in indexers.values()),
        ),
        kv_sources=tuple(sources),
        indexed=tuple(indexers),
    )


def later_states(layers: Sequence[LayerWeights]) -> list[int]:
    """Return the index in `KVShape` of each layer's first further state."""
    counts = [len(layer.later_mixers) for layer in layers]
    return list(accumulate(counts[:-1], initial=len(layers)))


def _layer(
    config: DecoderConfig, parameters: Parameters, prefix: str, layer: LayerConfig, rope: Rope | None
) -> LayerWeights:
    """Return the weights of one layer, which are taken out of `parameters`.

    The parts are those of `Decoder._block`: norms, attention or a mixer, a feed-forward or experts. Fields of parts
    that the layer lacks stay empty.
    """
    family = config.family
    names = family.norms_of(layer)
    norms = _Norms(config, parameters, prefix)
    after_attention, after_mlp = config.branch_offsets or (config.norm_weight_offset,) * 2
    weights = LayerWeights(
        input_norm=norms.weight(names.attention),  # (E,), as all norms here
        input_norm_bias=norms.bias(names.attention),
        attention=None,
        qkv=[],
        output=None,
        attention_post_norm=norms.of_branch(names.after_attention, after_attention),
        mlp_norm=norms.weight(names.mlp),
        mlp_norm_bias=norms.bias(names.mlp),
        gate_up=[],
        down=None,
        mlp_post_norm=norms.of_branch(names.after_mlp, after_mlp),
    )

    # The parts that mix tokens, then those of each token by itself
    if layer.attends:
        weights = _with_attention(weights, config, parameters, prefix, layer, rope)
    if layer.mixer is not None:
        weights = with_mixer(weights, config, parameters, prefix, layer, layer.mixer)
    if layer.experts is not None:
        weights = with_experts(weights, config, parameters, prefix, layer.experts)
    weights = with_feed_forward(weights, config, parameters, prefix, layer)

    # Parts of single families: Gemma's, and Kimi's mixtures of residual sums
    if config.input_size:
        weights = replace(weights, own_input=read_input(config, parameters, prefix))
    if config.altup is not None:
        weights = replace(weights, altup=_altup(config, parameters, prefix, config.altup))
    if config.block_layers:
        attention_mix, mlp_mix = (
            read_residual_mix(parameters, f"{prefix}.{name}", config.hidden_size) for name in RESIDUAL_MIXES
        )
        weights = replace(weights, mixes=(attention_mix, mlp_mix))
    if family.inner_norms:
        heads, inner = (parameters.vector(f"{prefix}.{norm.name}", norm.size) for norm in inner_norms(config, layer))
        weights = replace(weights, inner_norms=(heads, inner))
    if family.scaled and f"{prefix}.layer_scalar" in parameters:
        weights = replace(weights, scalar=parameters.vector(f"{prefix}.layer_scalar", 1))
    return weights


class _Norms:
    """Norms of a layer by name, each read once: in a parallel layer both halves have one. None for no name."""

    def __init__(self, config: DecoderConfig, parameters: Parameters, prefix: str) -> None:
        self._config = config
        self._parameters = parameters
        self._prefix = prefix
        self._read: dict[str, mx.array] = {}  # by tensor name

    def weight(self, name: str | None, offset: float | None = None) -> mx.array | None:
        """Return a norm's weight (E,); ones for a family whose norms have none. offset: None for that of all norms."""
        if name is None:
            return None
        if not self._config.family.norm_weights:
            return self._parameters.ones(self._config.hidden_size)
        if offset is None:
            offset = self._config.norm_weight_offset
        return self._vector(f"{self._prefix}.{name}.weight", offset)

    def of_branch(self, name: str | None, offset: float) -> mx.array | None:
        """Return the norm of a branch's output, with the factor of the branch folded in."""
        weight = self.weight(name, offset)
        if weight is None or self._config.branch_scale == 1.0:
            return weight
        return weight * self._config.branch_scale

    def bias(self, name: str | None) -> mx.array | None:
        """Return the bias (E,) of a LayerNorm that adds one."""
        if name is None or not self._config.family.norm_bias:
            return None
        return self._vector(f"{self._prefix}.{name}.bias", 0.0)

    def _vector(self, tensor: str, offset: float) -> mx.array:
        if tensor not in self._read:
            self._read[tensor] = self._parameters.vector(tensor, self._config.hidden_size, offset)
        return self._read[tensor]


def _with_attention(
    weights: LayerWeights,
    config: DecoderConfig,
    parameters: Parameters,
    prefix: str,
    layer: LayerConfig,
    rope: Rope | None,
) -> LayerWeights:
    """Add attention: its norms of heads, the projections into it, its gate, and the projection out of it."""
    at = f"{prefix}.self_attn"
    spec = _attention(config, parameters, at, layer, rope)
    latent = None
    if config.latent is not None:
        latent, qkv, output = read_latent(config, parameters, prefix, config.latent, layer)
        gate = _gate(config, parameters, prefix, layer)
    else:
        qkv, gate, output = _projections(config, parameters, prefix, layer, rope)
    return replace(
        weights,
        attention=spec,
        qkv=qkv,
        output=output,
        gate=gate,
        latent=latent,
        head_norms=_head_norms(config, parameters, at, layer, rope),
        values=_values(config, layer),
        loop_gate=_loop_gate(parameters, at, spec) if config.loop_gates else None,
    )


def _loop_gate(parameters: Parameters, at: str, spec: AttentionSpec) -> LoopGate:
    weight = parameters.vector(f"{at}.loop_gate.weight", spec.heads * spec.head_dim)
    bias = parameters.vector(f"{at}.loop_gate.bias", spec.heads)
    return LoopGate(weight.reshape(spec.heads, spec.head_dim), bias, replace(spec, projects="q", k_norm=None))


def _altup(config: DecoderConfig, parameters: Parameters, prefix: str, sizes: AltUpConfig) -> AltUpWeights:
    """Return the weights of a layer's parallel streams, see `AltUpWeights`."""
    width = config.hidden_size
    streams = sizes.streams
    router, left, right = altup_layer(config, sizes)

    def coefficients(name: str, *shape: int) -> mx.array:
        stored = parameters.vector(f"{prefix}.altup.{name}.weight", math.prod(shape), dtype=mx.float32)
        if sizes.bound is not None:
            stored = mx.clip(stored, -sizes.bound, sizes.bound)
        return stored.reshape(shape)

    return AltUpWeights(
        router=parameters.router(prefix, router),
        router_norm=parameters.vector(f"{prefix}.altup.router_norm.weight", width),
        prediction=coefficients("prediction_coefs", streams, streams, streams),
        correction=coefficients("correction_coefs", streams, streams),
        scale=parameters.vector(f"{prefix}.altup.correct_output_scale", width),
        left=parameters.tensor(prefix, left),
        right=parameters.tensor(prefix, right),
        laurel_norm=parameters.vector(f"{prefix}.laurel.post_laurel_norm.weight", width),
    )


def read_residual_mix(parameters: Parameters, name: str, width: int) -> ResidualMix:
    """Return the weights of a mixture of residual sums."""
    norm, projection = (parameters.vector(f"{name}_{part}.weight", width) for part in ("norm", "proj"))
    return ResidualMix(norm, projection)


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
    if order is None:
        return q, k
    return q[:, order], k[:, order]


def _projections(
    config: DecoderConfig, parameters: Parameters, prefix: str, layer: LayerConfig, rope: Rope | None
) -> tuple[list[Weight], Weight | None, Weight]:
    """Return the projections into attention and into an indexer, its gate, if any, and the projection out of it."""
    *inputs, output = attention(config, layer)
    gate = _gate(config, parameters, prefix, layer)
    if config.family.gates == "joined":
        inputs[0], gate = parameters.gated(prefix, inputs[0], config.heads)
    # After `gated`, which leaves the queries' rows for `fused`. An indexer's projections come last.
    qkv = parameters.fused(prefix, inputs, qkv_order(config, rope))
    qkv += [parameters.tensor(prefix, tensor) for tensor in indexer(config, layer)]
    return qkv, gate, parameters.tensor(prefix, output)


def _gate(config: DecoderConfig, parameters: Parameters, prefix: str, layer: LayerConfig) -> Weight | None:
    """Return the gates of attention's heads, if they are a module of their own."""
    gates = [parameters.tensor(prefix, tensor) for tensor in attention_gate(config, layer)]
    if not gates:
        return None
    [gate] = gates
    return gate


def _attention(
    config: DecoderConfig, parameters: Parameters, at: str, layer: LayerConfig, rope: Rope | None
) -> AttentionSpec:
    """Return the attention of a layer. Norms of heads are reordered as the rows of queries and keys (`head_order`)."""
    together = config.family.qk_norm == "heads"
    heads = config.query_heads(layer)
    kv_heads, head_dim = config.heads_of(layer)

    # Norms of queries and keys
    turns = None
    if config.family.interleaved:
        turns = head_order(head_dim, rope)

    def head_norm(name: str, heads: int) -> mx.array:
        """Return the norm of queries or keys: (D,) of each head, or (heads * D,) of all together."""
        size = head_dim * heads if together else head_dim
        weight = parameters.vector(f"{at}.{name}.weight", size, config.norm_weight_offset)
        if turns is not None:
            weight = weight.reshape(-1, head_dim)[:, turns].flatten()
        return weight

    q_norm = None
    k_norm = None
    if config.family.qk_norm in ("head", "heads"):
        q_norm = head_norm("q_norm", heads)
        if "k" in layer.projects:
            k_norm = head_norm("k_norm", kv_heads)

    # Sinks, and an indexer that chooses entries: over latents it is `LatentWeights.indexer`, elsewhere a chooser.
    sinks = None
    if layer.sinks:
        sinks = parameters.vector(f"{at}.sinks", heads)
    chosen = None
    chooser = None
    if layer.indexer is not None:
        chosen = layer.indexer.chosen
        if config.latent is None:
            chooser = _chooser(config, parameters, at, layer.indexer, rope)

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
    config: DecoderConfig, parameters: Parameters, at: str, sizes: IndexerConfig, rope: Rope | None
) -> BlockChooser:
    """Return the indexer of an attention without latents; its keys have one head, and no scale is applied to scores."""
    q_norm, k_norm = (
        parameters.vector(f"{at}.index_{part}_norm.weight", sizes.head_dim, config.norm_weight_offset)
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
    return mx.concatenate([neighbours_apart(rope.dims), mx.arange(rope.dims, head_dim)])


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
