"""Decoder-only transformer of the llama family, in the operations of `runtime.ops`.

A layer (`Decoder._block`) is norm, attention, residual, norm, feed-forward, residual. Recurrent mixing (gated delta
networks, Mamba, short convolutions) may stand in place of attention or next to it, and a mixture of experts in place
of the feed-forward. Norms may stand after each half, or only there. Where the operations can, they run all layers as
one node (`Decoder._fuse`), with the same bits.

Subclasses replace methods of `Decoder`, so a change of one of these may be one there, too:

    altup_decoder            _arrays, _read_ends, _run_layers
    block_residual_decoder   _arrays, _read_ends, _run_layers
    head_decoder             _arrays, _read_ends, logits
    long_rope_decoder        embed, kv_backend, layers, with_ops, with_part, without_layers
    rwkv_decoder             _run_layers
    stage_decoder            _read_ends, kv_backend, layers
    tensor_decoder           _add, _add_experts, _arrays, _fuse, _look_up, all_logits, embed, layers

Dimensions: B sequences, T new tokens, E hidden size, F feed-forward size, H query heads, Hkv key-value heads, D head
size, V vocabulary; L layers, P size of a layer's own input.

Guards: tests/parity/test_numpy_decoder.py and test_mlx_lm_families.py for logits, tests/models/cost/test_costs.py
for bytes and FLOPs, tests/models/network/test_overrides.py for the table.
"""

from collections.abc import Iterator
from copy import copy
from fractions import Fraction
from typing import Any

import mlx.core as mx
from msgspec.structs import replace

from headrace.models.architectures.config import DecoderConfig, LayerConfig
from headrace.models.network.decoder_costs import kv_layers, layer_matrices, state_bytes
from headrace.models.network.latent import absorbed, values_of
from headrace.models.network.layer_inputs import LayerInputs
from headrace.models.network.layers import in_every_loop, kv_shape_of, later_states, read_layers
from headrace.models.network.parameters import Parameters, module_bytes
from headrace.models.network.projections import (
    Epilogue,
    Product,
    Residual,
    add_experts,
    add_products,
    experts_output,
    gated_heads,
    loop_gates,
    normed_heads,
    of_small_values,
    project,
    stacked,
    with_gates,
    with_whole_values,
)
from headrace.models.network.tensors import (
    Tensor,
    attention,
    expert_stacks,
    feed_forward,
    latent,
    mixer_inputs,
    mixer_output,
)
from headrace.runtime.errors import ContextLimitError
from headrace.runtime.kv.backend import KVBackend, KVOptions
from headrace.runtime.kv.cache import KVPass
from headrace.runtime.kv.paged import PagedBackend
from headrace.runtime.metrics.cost import Matrix, StepCost, attention_flops_per_entry, step_cost
from headrace.runtime.network import DraftHead
from headrace.runtime.ops import (
    AttentionSpec,
    LayersNode,
    LayerWeights,
    LoopGate,
    Ops,
    Projections,
    Rope,
    ScanWeights,
    Weight,
    Xielu,
)
from headrace.runtime.ops.kv_format import KVFormat


class Decoder:
    """The network (see `runtime.network`) of all architectures in `models.architectures.config`."""

    draft_head: DraftHead | None = None  # set once the network is made
    activations = 16  # bits of a prompt's rounded activations, 16 or 8
    _norm_bias: mx.array | None = None  # of the last norm, a LayerNorm
    _ones: mx.array | None = None  # weight of norms that have none
    _positions: Weight | None = None  # table of learned positions
    _table_norm: tuple[mx.array, mx.array] | None = None  # weight and bias (E,)
    division = None  # `LeaderNetwork` has one

    def __init__(self, config: DecoderConfig, parameters: Parameters, kv: KVFormat | None = None) -> None:
        self.config = config
        self._ops = parameters.ops
        self._dtype = parameters.dtype
        # The largest matrices first: the memory of their conversion is free before the others take some.
        self._read_ends(config, parameters)
        self._layers = in_every_loop(config, read_layers(config, parameters))
        self._later_states = later_states(self._layers)
        self._prepared = parameters.prepared
        self._appending = config.appending  # asked for every layer of a pass
        self.kv_shape = kv_shape_of(config, self._layers, kv or self._ops.kv_format(self._dtype))
        attends = [layer.attention for layer in self._layers if layer.attention is not None]
        self.pages = all(self._ops.pages(spec) for spec in attends)
        self._shares_attention = all(self._ops.slots(spec) for spec in attends)
        self._layer_groups = self._fuse()
        self._adapter = parameters.check_adapter()

    def _read_ends(self, config: DecoderConfig, parameters: Parameters) -> None:
        """Read the weights before and after the layers."""
        width = config.hidden_size
        self._table = parameters.matrix("model.embed_tokens", config.vocab_size, width)
        self._inputs = LayerInputs(config, parameters) if config.input_size else None
        if config.positions:
            self._positions = parameters.matrix("model.embed_positions", config.positions, width)

        family = config.family
        if family.embedding_norm:
            weight, bias = (parameters.vector(f"model.embed_norm.{part}", width) for part in ("weight", "bias"))
            self._table_norm = weight, bias
        if not family.norm_weights or config.embedding_eps is not None:
            self._ones = parameters.ones(width)

        if family.norm_weights:
            offset = 0.0 if family.last_norm_whole else config.norm_weight_offset
            self._norm = parameters.vector("model.norm.weight", width, offset)
        else:
            self._norm = parameters.ones(width)
        self._norm_bias = None
        if family.norm_bias:
            self._norm_bias = parameters.vector("model.norm.bias", width)
        scale = config.logit_scale  # of every logit, and so of what the last norm returns
        if scale != 1.0:
            self._norm = self._norm * scale
            if self._norm_bias is not None:
                self._norm_bias = self._norm_bias * scale

        self._head = self._table
        if not config.tied_embeddings and "lm_head.weight" in parameters:
            self._head = parameters.matrix("lm_head", config.vocab_size, width)
        self.vocab_size = config.vocab_size

    @property
    def _stored_layers(self) -> list[LayerWeights]:
        """The layers that the checkpoint has, with the gates of later loops."""
        return self._layers[-len(self.config.stored) :]

    @property
    def ops(self) -> Ops:
        return self._ops

    # The methods `with_*` return copies that share all weights. `_layer_groups` is made of `_layers`, `_ops` and
    # `activations`, so a copy that changes one of these has to call `_fuse`; otherwise its nodes compute the old ones.

    def with_ops(self, ops: Ops) -> "Decoder":
        """Return a decoder with the same weights and wrapped operations, such as a profiler's."""
        twin = copy(self)
        twin._ops = ops
        twin._layer_groups = twin._fuse()
        return twin

    @property
    def dtype(self) -> mx.Dtype:
        return self._dtype

    @property
    def kv_format(self) -> KVFormat:
        return self.kv_shape.format

    def with_kv(self, kv: KVFormat) -> "Decoder":
        """Return a decoder with the same weights and K/V format `kv`, which `make_decoder.stored_kv` must allow."""
        twin = copy(self)
        twin.kv_shape = replace(self.kv_shape, format=kv)
        return twin

    def with_activations(self, bits: int) -> "Decoder":
        """Return a decoder with the same weights, which `models.network.activations` must allow."""
        twin = copy(self)
        twin.activations = bits
        return twin.with_ops(self._ops)  # the same operations: for its `_fuse`, with the new bits

    def with_part(self, parameters: Parameters, layer: int | None) -> "Decoder":
        """Return a decoder with one layer, or all weights outside of layers if None, read anew from `parameters`."""
        twin = copy(self)
        if layer is None:
            twin._read_ends(self.config, parameters)
            return twin
        stored = list(self._stored_layers)
        [stored[layer]] = read_layers(self.config, parameters, [layer])
        twin._layers = in_every_loop(self.config, stored)
        twin._layer_groups = twin._fuse()
        return twin

    def without_layers(self) -> "Decoder":
        """Return a decoder that shares the last norm and the head, and has no other weights: for `logits` alone."""
        twin = copy(self)
        twin._table = self._head
        twin._inputs = None
        twin._positions = None
        twin._layers = []
        twin._layer_groups = []
        twin._prepared = []
        return twin

    def weights_by_input(self) -> dict[str, Weight]:
        """Return one weight for each input of matrices, by the name of the product (`Tensor.product`)."""
        weights: dict[str, Weight] = {"lm_head": self._head}
        if self._head is self._table:
            weights["model.embed_tokens"] = self._head
        for index, (layer, stored) in enumerate(zip(self.config.stored, self._stored_layers, strict=True)):
            for tensor, weight in _weights_by_tensor(self.config, layer, stored):
                if weight is not None:
                    weights[f"model.layers.{index}.{tensor.product}"] = weight
        return weights

    def with_rope(self, rope: Rope) -> "Decoder":
        """Return a decoder with the same weights and `rope` in all layers with rotation."""
        twin = copy(self)
        twin._layers = list(self._layers)
        for index, layer in enumerate(self._layers):
            spec = layer.attention
            if spec is not None and spec.rope is not None:
                twin._layers[index] = replace(layer, attention=replace(spec, rope=rope))
        twin._layer_groups = twin._fuse()
        return twin

    @property
    def arrays(self) -> list[mx.array]:
        """Return every array of the network, to evaluate before the first step."""
        if self.draft_head is None:
            return self._arrays
        return [*self._arrays, *self.draft_head.arrays]

    @property
    def _arrays(self) -> list[mx.array]:
        """All but the draft head's."""
        arrays = [*self._table.arrays, self._norm, *self._head.arrays]
        if self._norm_bias is not None:
            arrays.append(self._norm_bias)
        arrays += self._table_norm or ()
        for layer in self._layers:
            weights = layer.matrices
            if layer.mixture is not None:
                weights += layer.mixture.stacks
            for weight in weights:
                arrays += weight.arrays
            arrays += layer.vectors
        if self._inputs is not None:
            arrays += [*self._inputs.arrays, *self._inputs.table.arrays]
        if self._positions is not None:
            arrays += self._positions.arrays
        arrays += self._adapter
        return list({id(array): array for array in arrays}.values())  # layers of several loops have the same

    @property
    def cost(self) -> StepCost:
        """Return bytes and FLOPs of a step, from the arrays that it reads.

        Where layers run several times in a step, their matrices count each time, norms and other vectors once.
        """
        read = {id(array): array for array in self._arrays}
        read.pop(id(self._ones), None)
        looked_up: list[mx.array] = []  # of tables, of which a step reads single rows
        if self._head is not self._table:
            looked_up += self._table.arrays
        if self._inputs is not None:
            looked_up += self._inputs.table.arrays
        if self._positions is not None:
            looked_up += self._positions.arrays
        for array in looked_up:  # a step reads a row of them
            del read[id(array)]
        nbytes = sum(array.nbytes for array in read.values())

        sizes = module_bytes(self._prepared)
        matrices = layer_matrices(self.config, lambda module, _tensor: sizes[module])
        head = self._head
        matrices.append(Matrix("head", 1, head.rows, head.columns, head.nbytes, output=True, part="head"))
        if self._adapter:
            numbers = sum(array.size for array in self._adapter)
            adapter_bytes = sum(array.nbytes for array in self._adapter)
            matrices.append(Matrix("adapter", 1, numbers, 1, adapter_bytes, reads=Fraction(self.config.loops)))

        return step_cost(
            matrices,
            nbytes - sum(matrix.count * matrix.nbytes for matrix in matrices),  # the rest is vectors'
            kv_layers(self.config, self.kv_shape.format),
            attention_flops_per_entry(self.config.heads, self.config.head_dim),
            state_bytes(self.config),
        )

    @property
    def wide_chunks(self) -> bool:
        """True for mixtures, of which every chunk reads all experts, and for heads of 256.

        On GPUs with tensor units MLX fuses the attention of such heads from 1,024 rows on.
        """
        return self.config.head_dim == 256 or any(layer.mixture for layer in self._layers)

    def kv_backend(self, options: KVOptions) -> KVBackend:
        """Blocks that attention reads in place, if all layers can; else buffers."""
        if self.pages:
            return PagedBackend(self.kv_shape, self._ops, options)
        from headrace.runtime.kv.buffers import BufferBackend  # late: the native kernels have blocks

        return BufferBackend(
            self.kv_shape,
            self._ops,
            options,
            shares_attention=self._shares_attention,
            scales=mx.float16 if self._dtype == mx.float32 else self._dtype,
        )

    def embed(self, tokens: mx.array) -> mx.array:
        """Embed tokens (B, T) to (B, T, E), followed by all layers' own inputs, if they have some."""
        x = self._look_up(tokens)
        if self.config.embedding_eps is not None and self._ones is not None:
            x = self._ops.rms_norm(x, self._ones, self.config.embedding_eps)
        if self._table_norm is not None:
            x = self._ops.layer_norm(x, *self._table_norm, self.config.norm_eps)
        scale = self.config.embedding_scale
        if scale != 1.0 and self.config.embedding_scale_in_bfloat16:
            x = x * mx.array(scale, mx.bfloat16).astype(self._dtype)
        elif scale != 1.0:
            x = x * scale
        if self._inputs is not None:
            x = mx.concatenate([x, self._inputs.compute(self._ops, tokens, x)], axis=-1)
        return x

    def _look_up(self, tokens: mx.array) -> mx.array:
        return self._ops.embed(tokens, self._table, self._dtype)

    @property
    def rolls_back(self) -> bool:
        """True if caches drop the entries of rejected draft tokens."""
        return self.kv_backend(KVOptions(1)).rolls_back

    def layers(self, x: mx.array, kv: KVPass) -> mx.array:
        """Run all layers on what `embed` returns and append T entries per layer -> (B, T, E), or its wanted rows.

        With a draft head, the last norm, too.
        """
        x = self._run_layers(self._placed(x, kv), kv)
        if self.draft_head is not None:
            x = self._ops.rms_norm(x, self._norm, self.config.norm_eps)
        return x

    def _placed(self, x: mx.array, kv: KVPass) -> mx.array:
        """Add learned positions, if there are some. Raises ContextLimitError past the last one."""
        if self._positions is None:
            return x
        positions: list[int] = []
        for row in kv.rows:
            positions += range(row.cache.length, row.cache.length + row.count)
        if max(positions) >= self.config.positions:
            raise ContextLimitError(f"the model has no positions beyond {self.config.positions}")
        added: mx.array = x + self._ops.embed(mx.array([positions], mx.uint32), self._positions, self._dtype)
        return added

    def _run_layers(self, x: mx.array, kv: KVPass) -> mx.array:
        """Run the layers on x (B, T, E + L * P), as one node for each group of them if the operations can."""
        embedded = x  # with the inputs of all layers, which nodes and single layers take from here
        residual = Residual(x)
        for layers, node in self._layer_groups:
            if self._is_left_out(layers.start, kv):
                # A node before it has returned no rows; its output is what the pass's other arrays wait for.
                return residual.x if residual.x.shape[1] == 0 else residual.x[:, :0]
            if node is not None and kv.runs_fused:
                entered = self._entered(residual, layers.start)
                x = self._with_own_inputs(entered.x, embedded, layers)
                residual = Residual(kv.run_fused(layers, x, node))
                continue
            for index in range(layers.start, layers.stop):
                residual = self._layer(self._entered(residual, index), kv, index, embedded)
        return residual.x

    def _entered(self, residual: Residual, index: int) -> Residual:
        """Return the stream as layer `index` reads it: normalized, if the layer begins a loop after such a norm."""
        if not self._begins_after_norm(index):
            return residual
        return Residual(self._ops.rms_norm(residual.x, self._norm, self.config.norm_eps))

    def _begins_after_norm(self, index: int) -> bool:
        """Return whether layer `index` begins a second or later loop, and a norm ended the loop before."""
        return self.config.loop_norm and index > 0 and index % len(self.config.stored) == 0

    def _is_left_out(self, index: int, kv: KVPass) -> bool:
        """Return whether a pass needs no layer from `index` on: none appends K/V, and no row's output is wanted."""
        return index >= self._appending and not any(row.output for row in kv.rows)

    def logits(self, x: mx.array) -> mx.array:
        """Return the logits (B, V) of the last position of x (B, T, E)."""
        if x.shape[1] > 1:
            x = x[:, -1:]
        return self.all_logits(x)[:, 0]

    def all_logits(self, x: mx.array) -> mx.array:
        """Return the logits (B, T, V) of every position of x (B, T, E)."""
        if self.draft_head is not None:  # `layers` has normalized x, by an RMSNorm: `HeadDecoder.of` refuses others
            logits = self._ops.linear(x, self._head)
        else:
            residual = self._normed(Residual(x), self._norm, self._norm_bias)
            logits = stacked(project(self._ops, residual, self._norm, self.config.norm_eps, [self._head]))
        cap = self.config.logit_softcap
        if cap is not None:
            logits = mx.tanh(logits / cap) * cap
        return logits

    def _fuse(self, **more: Any) -> list[tuple[slice, LayersNode | None]]:
        """Return the layers in groups to compute as one node; those of a group one by one, if that is not possible.

        Layers after the last that appends K/V are a group of their own: a pass without logits leaves them out. So are
        those of each loop.
        """
        family = self.config.family
        count = len(self._layers)
        one_by_one = [slice(index, index + 1) for index in range(count)]
        if family.norm != "rms" or family.parallel:  # no node computes these
            return [(layers, None) for layers in one_by_one]

        def node(layers: slice) -> LayersNode | None:
            return self._ops.fuse(
                self._layers[layers], self.config.norm_eps, family.activation, rounding=self.activations, **more
            )

        appends = self._appending
        loops = range(0, count, len(self.config.stored))
        starts = [index for index in range(count) if index in loops or index == appends]
        groups = [slice(start, stop) for start, stop in zip(starts, [*starts[1:], count], strict=True)]
        made: list[tuple[slice, LayersNode | None]] = []
        for layers in groups:
            whole = node(layers)
            parts = [layers] if whole is not None else one_by_one[layers]
            made += [(part, whole or node(part)) for part in parts]
        return made

    def _with_own_inputs(self, x: mx.array, embedded: mx.array, layers: slice) -> mx.array:
        """Return x (B, T, E), or what `embed` returned, followed by the inputs of these layers."""
        size = self.config.input_size
        width = self.config.hidden_size
        if not size or len(self._layer_groups) == 1:
            return x
        own_inputs = embedded[..., width + layers.start * size : width + layers.stop * size]
        return mx.concatenate([x[..., :width], own_inputs], axis=-1)

    def _layer(self, residual: Residual, kv: KVPass, index: int, embedded: mx.array) -> Residual:
        """Run one layer, then add its own input, if layers have some. embedded: what `embed` returned."""
        ops = self._ops
        layer = self._layers[index]
        width = self.config.hidden_size
        own_input = layer.own_input
        epilogue = Epilogue(self._next_norm(index), layer.scalar)
        if residual.x.shape[-1] != width:  # the first layer: all layers' own inputs follow the hidden state
            residual = Residual(residual.x[..., :width])
        if own_input is None:
            return self._block(residual, kv, index, epilogue)
        x = self._block(residual, kv, index, Epilogue()).x
        gated = ops.glu(ops.linear(x, own_input.gate), self._own_input(embedded, index), "gelu")
        return add_products(
            ops, x, [Product(gated, own_input.projection)], own_input.norm, self.config.norm_eps, epilogue
        )

    def _own_input(self, embedded: mx.array, index: int) -> mx.array:
        """Return a layer's own input (B, T, P). embedded: what `embed` returned."""
        size = self.config.input_size
        start = self.config.hidden_size + index * size
        return embedded[..., start : start + size]

    def _next_norm(self, index: int) -> mx.array | None:
        """Return the norm that begins the next layer, if that normalizes the sum that ends this one as it is."""
        family = self.config.family
        after = index + 1
        if family.norm == "layer" or family.parallel or after == len(self._layers) or self._begins_after_norm(after):
            return None
        return self._layers[after].input_norm

    def _block(self, residual: Residual, kv: KVPass, index: int, epilogue: Epilogue) -> Residual:
        """Run norm, attention or mixer, residual, norm, feed-forward or mixture, residual."""
        layer = self._layers[index]
        family = self.config.family
        entered = residual.x

        # x (B, T, E) + output(attention(qkv(norm(x))))
        if layer.output is None:  # nothing mixes tokens
            return self._add(residual.x, [self._feed_forward(residual, layer)], layer.mlp_post_norm, epilogue)
        inputs = self._normed(residual, layer.input_norm, layer.input_norm_bias)
        attended = self._attention(inputs, kv, index)  # (B, T, H * D); then a mixer's, next to it
        if family.parallel:  # both halves have the same input, and one sum
            if layer.mlp_norm is not layer.input_norm:
                inputs = self._normed(residual, layer.mlp_norm, layer.mlp_norm_bias)
            if layer.mixture is not None:
                return self._add_parallel_experts(inputs, attended, index, epilogue)
            return self._add(residual.x, [*attended, self._feed_forward(inputs, layer)], None, epilogue)
        if layer.mixture is None and layer.down is None:
            return self._add(residual.x, attended, layer.attention_post_norm, epilogue)
        mlp_norm = layer.mlp_norm if family.norm == "rms" else None
        residual = self._add(residual.x, attended, layer.attention_post_norm, Epilogue(mlp_norm))
        residual = self._normed(residual, layer.mlp_norm, layer.mlp_norm_bias)

        # x (B, T, E) + down(activation(gate_up(norm(x))))
        if layer.mixture is not None:
            dense = None
            if layer.down is not None:
                dense = self._shared_expert(residual, index)
            if layer.mixture.routing.routes_early:
                residual = replace(residual, entered=entered)
            return self._add_experts(residual, layer, dense, epilogue)
        fed = self._feed_forward(residual, layer)  # (B, T, F)
        return self._add(residual.x, [fed], layer.mlp_post_norm, epilogue)

    def _add_parallel_experts(
        self, inputs: Residual, attended: list[Product], index: int, epilogue: Epilogue
    ) -> Residual:
        """Add attention's heads, the output of experts and the expert of all tokens, which have the same input."""
        layer = self._layers[index]
        products = list(attended)
        if layer.down is not None:
            products.append(self._shared_expert(inputs, index))
        routed = experts_output(self._ops, inputs, layer, self.config)
        return self._add(inputs.x, products, None, epilogue, routed)

    def _shared_expert(self, inputs: Residual, index: int) -> Product:
        """Return the feed-forward next to a layer's experts, times its factor."""
        product = self._feed_forward(inputs, self._layers[index])
        experts = self.config.layers[index].experts
        if experts is None or experts.shared_scale == 1.0:
            return product
        return product._replace(x=product.x * experts.shared_scale)

    def _attention(self, residual: Residual, kv: KVPass, index: int) -> list[Product]:
        """Return the heads of attention, gated, (B, T, H * D), and the output of a mixer next to it, if any."""
        ops = self._ops
        eps = self.config.norm_eps
        layer = self._layers[index]
        assert layer.output is not None
        # All projections of this half have the input norm as their first step.
        qkv = project(ops, residual, layer.input_norm, eps, layer.qkv)  # (B, T, (H + 2 Hkv) * D) or its parts
        if self.config.qkv_bound is not None:
            qkv = [mx.clip(part, -self.config.qkv_bound, self.config.qkv_bound) for part in qkv]
        if layer.head_norms is not None:
            qkv = normed_heads(ops, qkv, layer.head_norms, eps)
        heads = self._mix_tokens(kv, index, qkv)
        if layer.gate is not None:
            gate = stacked(project(ops, residual, layer.input_norm, eps, [layer.gate]))  # (B, T, H * D) or (B, T, H)
            heads = gated_heads(ops, gate, heads, self.config.family.gates)
        if layer.inner_norms is not None:
            heads = ops.rms_norm(heads, layer.inner_norms[0], eps)
        products = [Product(heads, layer.output)]
        if layer.mixer_ends is not None and layer.mixer is not None:
            into_mixer, out_of_mixer = layer.mixer_ends
            projected = stacked(project(ops, residual, layer.input_norm, eps, [into_mixer]))
            mixed = kv.mix(index, projected, layer.mixer)  # (B, T, Hv * Dv)
            products.append(Product(mixed, out_of_mixer))
        return products

    def _mix_tokens(self, kv: KVPass, index: int, projected: Projections) -> mx.array:
        """Mix tokens by attention over the KV cache, or by recurrent state in its place."""
        layer = self._layers[index]
        if layer.scan is not None:
            return self._scan(kv, index, stacked(projected), layer.scan)
        if layer.mixer is not None and layer.attention is None:
            return kv.mix(index, with_gates(self._ops, stacked(projected), layer), layer.mixer)
        spec = layer.attention
        latent = layer.latent
        assert spec is not None
        if layer.values is not None:
            attended = kv.attend(index, with_whole_values(projected, layer.values, spec), spec)
            return of_small_values(attended, layer.values, spec)
        if layer.loop_gate is not None:
            return self._attend_in_loop(kv, index, projected, spec, layer.loop_gate)
        if latent is None:
            return kv.attend(index, projected, spec)
        rows = absorbed(self._ops, projected, latent, spec.heads)
        attended = kv.attend(index, rows, spec)  # (1, N, H * (R + L)): sums of latents
        return values_of(self._ops, attended, latent, spec.heads)

    def _attend_in_loop(
        self, kv: KVPass, index: int, projected: Projections, spec: AttentionSpec, gate: LoopGate
    ) -> mx.array:
        """Return attention to the entries of this loop and of the first, weighed by gates of each head."""
        queries = stacked(projected)[..., : spec.heads * spec.head_dim]  # (1, N, H * D)
        attended = kv.attend(index, projected, spec)
        to_first = kv.attend(index % len(self.config.stored), [queries], gate.first)
        shares = loop_gates(self._ops, queries, gate, kv.rows)  # (1, N, H, 1), of the first loop
        first, this = (heads.reshape(*shares.shape[:3], -1) for heads in (to_first, attended))  # (1, N, H, D)
        return (shares * first + (1 - shares) * this).reshape(attended.shape)

    def _scan(self, kv: KVPass, index: int, x: mx.array, scan: ScanWeights) -> mx.array:
        """Mix tokens by a convolution and a selective scan (Mamba).

        x (B, T, 2 C): inputs, then gates -> (B, T, C).
        """
        ops = self._ops
        layer = self._layers[index]
        [recurrence] = layer.later_mixers
        numbers = recurrence.sizes.key_dim
        rank = scan.step.columns
        assert layer.mixer is not None
        inputs, gate = mx.split(x, 2, axis=-1)
        inputs = kv.mix(index, inputs, layer.mixer)
        parts = list(mx.split(ops.linear(inputs, scan.into), [rank, rank + numbers], axis=-1))  # steps, B, C
        if scan.norms is not None:
            parts = [ops.rms_norm(part, norm, scan.norm_eps) for part, norm in zip(parts, scan.norms, strict=True)]
        steps, *others = parts
        row = mx.concatenate([inputs, gate, ops.linear(steps, scan.step), *others], axis=-1)
        return kv.mix(self._later_states[index], row, recurrence)

    def _feed_forward(self, residual: Residual, layer: LayerWeights) -> Product:
        """Return the inner values of the dense feed-forward (B, T, F), and its projection back."""
        ops = self._ops
        eps = self.config.norm_eps
        activation = self.config.family.activation if layer.curve is None else layer.curve
        assert layer.down is not None
        if len(layer.gate_up) == 1:
            x = residual.x
            norm = layer.mlp_norm
            if residual.normed is not None:  # the addition before has normalized it
                x = residual.normed
                norm = None
            inner = ops.norm_glu(x, norm, eps, layer.gate_up[0], activation)
        else:
            gate, up = project(ops, residual, layer.mlp_norm, eps, layer.gate_up)
            assert not isinstance(activation, Xielu)  # it has no gate
            inner = ops.glu(gate, up, activation)
        if layer.inner_norms is not None:
            inner = ops.rms_norm(inner, layer.inner_norms[1], eps)
        return Product(inner, layer.down)

    def _add(
        self,
        x: mx.array,
        products: list[Product],
        post_norm: mx.array | None,
        epilogue: Epilogue,
        routed: mx.array | None = None,
    ) -> Residual:
        """Project the results of a half of a layer, and add them to the residual stream x (B, T, E).

        routed: the output of experts next to them (B, T, E), if any.
        """
        if routed is not None:
            x = x + routed
        return add_products(self._ops, x, products, post_norm, self.config.norm_eps, epilogue)

    def _add_experts(
        self, residual: Residual, layer: LayerWeights, dense: Product | None, epilogue: Epilogue
    ) -> Residual:
        """Add the output of a layer's experts. dense: the feed-forward next to them, if any."""
        return add_experts(self._ops, residual, layer, dense, self.config, epilogue)

    def _normed(self, residual: Residual, norm: mx.array | None, bias: mx.array | None) -> Residual:
        """Return the stream with its LayerNorm; RMSNorms are left to the next projection, as parts of it."""
        if self.config.family.norm == "rms" or norm is None:
            return residual
        return Residual(residual.x, self._ops.layer_norm(residual.x, norm, bias, self.config.norm_eps))


def _weights_by_tensor(
    config: DecoderConfig, layer: LayerConfig, weights: LayerWeights
) -> Iterator[tuple[Tensor, Weight | None]]:
    """Yield tensors of a layer, each with a weight that has the same input. Heads of latents and routers have none."""
    output = weights.output
    if layer.attends and config.latent is not None and weights.latent is not None:
        into = weights.qkv[0]
        by_name = {"q_a_proj": into, "q_proj": into, "kv_a_proj_with_mqa": into, "q_b_proj": weights.latent.q}
        by_name["o_proj"] = output
        for tensor in latent(config, config.latent):
            yield tensor, by_name.get(tensor.name.rpartition(".")[2])
    elif layer.attends:
        *inputs, last = attention(config, layer)
        yield from ((tensor, weights.qkv[0]) for tensor in inputs)
        yield last, output
    elif layer.mixer is not None and layer.mixer.time_mix is None:
        yield from ((tensor, weights.qkv[0]) for tensor in mixer_inputs(config, layer.mixer))
        yield mixer_output(config, layer.mixer), output
    dense = feed_forward(config, layer)
    if dense:
        *inputs, last = dense
        yield from ((tensor, weights.gate_up[0]) for tensor in inputs)
        yield last, weights.down
    if layer.experts is not None and weights.mixture is not None:
        *inputs, last = expert_stacks(config, layer.experts)
        mixture = weights.mixture
        yield from ((tensor, mixture.up if mixture.gate is None else mixture.gate) for tensor in inputs)
        yield last, mixture.down
