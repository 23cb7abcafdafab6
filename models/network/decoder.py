"""The decoder: a transformer of the llama family, written once, in the operations of `runtime.ops`.

One layer is five operations (norm + q/k/v, attention, output + residual, norm + gated feed-forward, down + residual);
Gemma adds a norm behind each half; a mixture of experts is one operation in place of the last two.
B = sequences, T = new tokens, E = hidden size, F = feed-forward size, H / Hkv = query / key-value heads, D = head
dimension, V = vocabulary.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace

import mlx.core as mx

from headrace.models.network.config import DecoderConfig, ExpertsConfig, LayerConfig
from headrace.models.network.decoder_costs import network_cost
from headrace.models.network.parameters import Parameters
from headrace.models.network.rope import make_rope
from headrace.runtime.kv.cache import KVCache, KVShape, LayerCache
from headrace.runtime.kv.joined_cache import JoinedCache
from headrace.runtime.kv.joined_pages import JoinedPages
from headrace.runtime.kv.joined_slots import JoinedSlots
from headrace.runtime.kv.packed_cache import PackedCache
from headrace.runtime.kv.paged_cache import KVPool, PagedCache
from headrace.runtime.kv.slot_cache import SlotCache, SlotPool
from headrace.runtime.metrics.cost import StepCost
from headrace.runtime.ops import (
    AttentionSpec,
    LayersNode,
    LayerWeights,
    Mixture,
    Ops,
    Phase,
    Projections,
    Rope,
    Weight,
)
from headrace.runtime.ops.kv_format import KVFormat


class Decoder:
    """A network (see `runtime.network`) for every architecture of `models.network.config`."""

    joins = True
    rolls_back = True

    def __init__(
        self, config: DecoderConfig, parameters: Parameters, ops: Ops, dtype: mx.Dtype, kv: KVFormat | None = None
    ) -> None:
        self.config = config
        self._ops = ops
        self._dtype = dtype
        self.kv_shape = _kv_shape(config, kv or ops.kv_format(dtype))
        width = config.hidden_size
        self._table = parameters.matrix("model.embed_tokens", config.vocab_size, width)
        self._layers = _read_layers(config, parameters)
        self.pages = all(ops.pages(layer.attention) for layer in self._layers)
        self._in_slots = all(ops.slots(layer.attention) for layer in self._layers)
        self._layer_groups = self._fuse(ops)
        self._norm = parameters.vector("model.norm.weight", width, config.norm_weight_offset)
        tied = config.tied_embeddings or "lm_head.weight" not in parameters
        self._head = self._table if tied else parameters.matrix("lm_head", config.vocab_size, width)
        self.vocab_size = config.vocab_size

    @property
    def ops(self) -> Ops:
        """The operations it runs on."""
        return self._ops

    def with_ops(self, ops: Ops) -> "Decoder":
        """The same weights on other operations of the same kind: a profiler's that note what they pass on."""
        twin = copy(self)
        twin._ops = ops
        twin._layer_groups = twin._fuse(ops)
        return twin

    @property
    def dtype(self) -> mx.Dtype:
        """Of what it computes in."""
        return self._dtype

    @property
    def kv_format(self) -> KVFormat:
        """How K/V are stored."""
        return self.kv_shape.format

    def with_kv(self, kv: KVFormat) -> "Decoder":
        """The same weights, K/V stored as `kv`, which `models.network.stored_kv` has allowed."""
        twin = copy(self)
        twin.kv_shape = replace(self.kv_shape, format=kv)
        return twin

    def with_rope(self, rope: Rope) -> "Decoder":
        """The same weights, turned by `rope` wherever a layer turns."""
        twin = copy(self)
        twin._layers = [
            replace(layer, attention=replace(layer.attention, rope=rope if layer.attention.rope else None))
            for layer in self._layers
        ]
        twin._layer_groups = twin._fuse(self._ops)
        return twin

    @property
    def arrays(self) -> list[mx.array]:
        """Every array of the network, to load before the first step."""
        arrays = [*self._table.arrays, self._norm, *self._head.arrays]
        for layer in self._layers:
            stacks = layer.mixture.stacks if layer.mixture else ()
            for weight in (*layer.matrices, *stacks):
                arrays += weight.arrays
            norms = (layer.input_norm, layer.attention_post_norm, layer.mlp_norm, layer.mlp_post_norm)
            heads = (layer.attention.q_norm, layer.attention.k_norm, layer.attention.sinks)
            arrays += [vector for vector in (*norms, *heads) if vector is not None]
        return arrays

    @property
    def cost(self) -> StepCost:
        """Bytes and FLOPs of a step, from the arrays that it reads."""
        read = {id(array): array for array in self.arrays}
        if self._head is not self._table:
            for array in self._table.arrays:
                del read[id(array)]  # an untied table is looked up, not read
        nbytes = sum(array.nbytes for array in read.values())
        count = self._head.rows * self._head.columns
        for layer in self._layers:
            count += sum(weight.rows * weight.columns for weight in layer.matrices)
            if (mixture := layer.mixture) is None:
                continue
            for stack in mixture.stacks:  # of which the chosen experts' share is read
                nbytes -= stack.nbytes - stack.nbytes * mixture.active // mixture.count
                count += stack.rows * stack.columns * mixture.active // mixture.count
        return network_cost(self.config, weight_bytes=nbytes, weight_count=count, kv=self.kv_shape.format)

    def make_cache(self, limit: int) -> KVCache | PagedCache:
        if self.kv_shape.format.packed:
            if self.pages:  # the kernels read them in blocks
                return KVPool(self.kv_shape, self._ops, limit).make_cache(limit)
            scales = mx.float16 if self._dtype == mx.float32 else self._dtype
            return PackedCache(self.kv_shape, limit=limit, ops=self._ops, dtype=scales)
        return KVCache(self.kv_shape, limit=limit, ops=self._ops)

    def make_pool(self, entries: int, kept: int, key: bytes = b"") -> KVPool | None:
        if not self.pages and self.kv_format.packed:  # rows of MLX's own layout, which no block has
            return None
        return (KVPool if self.pages else SlotPool)(self.kv_shape, self._ops, entries, key, kept)

    def shares_pass(self, _caches: Sequence[object], _rows: Sequence[tuple[int, Phase]]) -> bool:
        """Rows of any kind do."""
        return True

    def join(
        self, caches: Sequence[KVCache | PagedCache], rows: Sequence[tuple[int, Phase]]
    ) -> JoinedCache | JoinedPages:
        """All of them of one pool, or in slots that attend at once, or each by itself."""
        paged = [cache for cache in caches if isinstance(cache, PagedCache)]
        if len(paged) == len(caches):
            return JoinedPages(paged, rows)
        slots = self._in_slots and all(isinstance(cache, SlotCache) for cache in caches)
        return (JoinedSlots if slots else JoinedCache)(caches, rows)

    def embed(self, tokens: mx.array) -> mx.array:
        """tokens (B, T) -> (B, T, E)."""
        x = self._ops.embed(tokens, self._table, self._dtype)
        scale = self.config.embedding_scale
        if scale == 1.0:
            return x
        if self.config.embedding_scale_in_bfloat16:
            return x * mx.array(scale, mx.bfloat16).astype(self._dtype)
        return x * scale

    def layers(self, x: mx.array, cache: LayerCache) -> mx.array:
        """x (B, T, E) -> (B, T, E), T entries per layer appended to the cache."""
        for layers, node in self._layer_groups:
            if node is not None and cache.runs_fused:
                x = cache.run_fused(layers, x, node)
                continue
            for index in range(layers.start, layers.stop):
                x = self._layer(x, cache, index)
        return x

    def logits(self, x: mx.array) -> mx.array:
        """Logits of the last position. x (B, T, E) -> (B, V)."""
        return self.all_logits(x if x.shape[1] == 1 else x[:, -1:])[:, 0]  # no node where there is nothing to cut

    def all_logits(self, x: mx.array) -> mx.array:
        """Logits of every position. x (B, T, E) -> (B, T, V)."""
        logits = self._ops.norm_linear(x, self._norm, self.config.norm_eps, self._head)
        cap = self.config.logit_softcap
        return logits if cap is None else mx.tanh(logits / cap) * cap

    def _fuse(self, ops: Ops) -> list[tuple[slice, LayersNode | None]]:
        """The layers in groups that can be computed at once: all of them, or else what can be, one by one."""
        eps, activation = self.config.norm_eps, self.config.activation
        every = slice(0, len(self._layers))
        if (node := ops.fuse(self._layers, eps, activation)) is not None:
            return [(every, node)]
        return [(slice(i, i + 1), ops.fuse([layer], eps, activation)) for i, layer in enumerate(self._layers)]

    def _layer(self, x: mx.array, cache: LayerCache, index: int) -> mx.array:
        ops, eps, layer = self._ops, self.config.norm_eps, self._layers[index]
        qkv = _project(ops, x, layer.input_norm, eps, layer.qkv)  # (B, T, (H + 2 Hkv) * D) or its parts
        heads = cache.attend(index, qkv, layer.attention)  # (B, T, H * D)
        x = _add(ops, x, heads, layer.output, layer.attention_post_norm, eps)
        if layer.mixture is not None:
            return ops.experts(x, layer.mlp_norm, eps, layer.mixture, self.config.activation)
        assert layer.down is not None
        inner = self._feed_forward(x, layer)  # (B, T, F)
        return _add(ops, x, inner, layer.down, layer.mlp_post_norm, eps)

    def _feed_forward(self, x: mx.array, layer: LayerWeights) -> mx.array:
        ops, config = self._ops, self.config
        if len(layer.gate_up) == 1:
            return ops.norm_glu(x, layer.mlp_norm, config.norm_eps, layer.gate_up[0], config.activation)
        x = ops.rms_norm(x, layer.mlp_norm, config.norm_eps)
        gate, up = (ops.linear(x, weight) for weight in layer.gate_up)
        return ops.glu(gate, up, config.activation)


def _kv_shape(config: DecoderConfig, kv: KVFormat) -> KVShape:
    windows = tuple(layer.window for layer in config.layers)
    return KVShape(len(windows), config.kv_heads, config.head_dim, kv, windows)


def _project(ops: Ops, x: mx.array, norm: mx.array, eps: float, weights: list[Weight]) -> Projections:
    """Norm, then the projections of it: in one, or as many as could not be stacked."""
    if len(weights) == 1:
        return ops.norm_linear(x, norm, eps, weights[0])
    x = ops.rms_norm(x, norm, eps)
    return [ops.linear(x, weight) for weight in weights]


def _add(ops: Ops, residual: mx.array, x: mx.array, weight: Weight, post_norm: mx.array | None, eps: float) -> mx.array:
    """Project a block's result and add it to the residual stream, through Gemma's second norm where there is one."""
    if post_norm is None:
        return ops.linear_add(x, weight, residual)
    return residual + ops.rms_norm(ops.linear(x, weight), post_norm, eps)


def _read_layers(config: DecoderConfig, parameters: Parameters) -> list[LayerWeights]:
    ropes = {
        layer.rope: make_rope(layer.rope, config.head_dim, config.context_length)
        for layer in config.layers
        if layer.rope is not None
    }
    width, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
    offset = config.norm_weight_offset

    def attention(prefix: str, layer: LayerConfig) -> AttentionSpec:
        def head_norm(name: str) -> mx.array | None:
            return parameters.vector(f"{prefix}.{name}.weight", config.head_dim, offset) if config.qk_norm else None

        return AttentionSpec(
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            scale=config.attention_scale,
            rope=ropes[layer.rope] if layer.rope else None,
            q_norm=head_norm("q_norm"),
            k_norm=head_norm("k_norm"),
            norm_eps=config.norm_eps,
            window=layer.window,
            softcap=config.attention_softcap,
            sinks=parameters.vector(f"{prefix}.sinks", config.heads) if config.sinks else None,
        )

    def mixture(mlp: str, experts: ExpertsConfig) -> Mixture:
        stacked, each = f"{mlp}.{experts.stacked}", f"{mlp}.{experts.each}"

        def stack(name: str, rows: int, columns: int) -> Weight:
            return parameters.stack(f"{stacked}.{name}", f"{each}.{name}", experts.count, rows, columns)

        return Mixture(
            router=parameters.router(f"{mlp}.{experts.router}", experts.count, width),
            gate=stack("gate_proj", experts.size, width),
            up=stack("up_proj", experts.size, width),
            down=stack("down_proj", width, experts.size),
            active=experts.active,
            normalized=experts.normalized,
        )

    def read(index: int, layer: LayerConfig) -> LayerWeights:
        at = f"model.layers.{index}"
        attn, mlp = f"{at}.self_attn", f"{at}.mlp"

        def norm(name: str) -> mx.array:
            return parameters.vector(f"{at}.{name}.weight", width, offset)

        dense = layer.experts is None
        return LayerWeights(
            attention=attention(attn, layer),
            input_norm=norm("input_layernorm"),
            qkv=parameters.fused(
                [(f"{attn}.q_proj", q_rows), (f"{attn}.k_proj", kv_rows), (f"{attn}.v_proj", kv_rows)],
                width,
                f"{attn}.qkv_proj",
            ),
            output=parameters.matrix(f"{attn}.o_proj", width, q_rows),
            attention_post_norm=norm("post_attention_layernorm") if config.post_norms else None,
            mlp_norm=norm("pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"),
            gate_up=parameters.fused(
                [(f"{mlp}.gate_proj", inner), (f"{mlp}.up_proj", inner)], width, f"{mlp}.gate_up_proj"
            )
            if dense
            else [],
            down=parameters.matrix(f"{mlp}.down_proj", width, inner) if dense else None,
            mlp_post_norm=norm("post_feedforward_layernorm") if config.post_norms else None,
            mixture=mixture(mlp, layer.experts) if layer.experts else None,
        )

    return [read(index, layer) for index, layer in enumerate(config.layers)]
