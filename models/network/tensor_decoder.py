"""A rank of the decoder in tensor parallelism: parts of each layer, whose results are summed over the ranks.

A layer has two sums (Megatron-LM, arXiv:1909.08053), one if attention and feed-forward are parallel, and one more for
norms over the heads of all ranks. Experts and a dense feed-forward with norms of their own go together into one sum.
The residual stream has the same bits on every rank.

`loading.rank_part` makes it. Rank 0's engine runs passes as with any network, the others run `follow` for each pass.
Every rank has to call the group's sums in the same order: a sum that one leaves out stops all of them. Methods replace
`Decoder`'s, whose module lists them. `head_decoder.TensorHead` is a rank's part of a draft head: it calls `own_rows`,
and `draft_head` is one.
Guard: tests/models/network/test_ranks.py compares every family with one machine.

Dimensions: B sequences, T new tokens, E hidden size, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from msgspec.structs import replace

from headrace.models.network.decoder import Decoder
from headrace.models.network.parameters import Parameters
from headrace.models.network.projections import Epilogue, Product, Residual, experts_output, gated, scaled, stacked
from headrace.models.network.tensor_part import TensorPart, head_ranges, kv_range
from headrace.runtime.kv.cache import KVPass
from headrace.runtime.ops import AttentionSpec, LayersNode, LayerWeights, MixerSpec, Mixture, Projections
from headrace.runtime.ops.kv_format import KVFormat
from headrace.runtime.ops.native_plans import kernels
from headrace.runtime.ranks.group import Group


class TensorDecoder(Decoder):
    """A rank's part of the decoder. Rank 0 has the residual stream in its partial sums, and all ranks their sum.

    part: the matrices and heads of this rank.
    parameters, kv: see `Decoder`.
    group: connects the ranks.
    """

    def __init__(self, part: TensorPart, parameters: Parameters, kv: KVFormat | None, group: Group) -> None:
        self._group = group
        self._is_first = part.rank == 0
        # `Decoder` reads the layers and calls `_fuse`, which without a peer makes no node: the layers change below.
        self._peer: kernels.Peer | None = None
        super().__init__(part.config, parameters, kv)
        self._norms = SharedNorms(part, group, self._layers)
        self._layers = [replace(layer, mixture=self._own(layer.mixture)) for layer in self._norms.layers]
        # The peer adds the other parts within the node of all layers. Norms over the heads of all ranks need sums
        # between them, so no node.
        if not self._norms.arrays:
            self._peer = group.peer
        self._layer_groups = self._fuse()
        self._vocabulary = part.split_vocabulary
        self.vocab_size = part.whole.vocab_size

    def follow(self, kv: KVPass) -> list[mx.array]:
        """Run rank 0's pass; return what it evaluates."""
        # The tokens come in `embed`, from rank 0.
        num_tokens = sum(row.count for row in kv.rows)
        x = self.layers(self.embed(mx.zeros((1, num_tokens), mx.uint32)), kv)  # (1, N, E)
        kv.advance()

        # The rows of which rank 0 computes logits.
        end = 0
        chosen = list[int]()  # rows with logits
        for row in kv.rows:
            end += row.count
            chosen += range(end - row.logits, end)
        if not chosen:
            return [x] if any(row.hidden for row in kv.rows) else kv.arrays
        rows = x[0]
        if chosen != list(range(x.shape[1])):
            rows = rows[mx.array(chosen)]
        return [self.logits(rows[:, None])]

    def all_logits(self, x: mx.array) -> mx.array:
        """Return the logits (B, T, V) of every position of x (B, T, E), on rank 0; the others evaluate the result."""
        return self._at_once(
            self._group.gather_columns(super().all_logits(x), [len(rows) for rows in self._vocabulary])
        )

    def layers(self, x: mx.array, kv: KVPass) -> mx.array:
        out = super().layers(x, self._norms.around(kv))
        rows = kv.rows
        if any(row.hidden for row in rows) and not any(row.logits for row in rows):
            return self._at_once(out)
        return out

    def _at_once(self, x: mx.array) -> mx.array:
        """Hand x to the device, with a draft head: passes of a step are evaluated in their order on every rank."""
        if self.draft_head is not None:
            mx.async_eval(x)
        return x

    @property
    def _arrays(self) -> list[mx.array]:
        return [*super()._arrays, *self._norms.arrays]

    def _own(self, mixture: Mixture | None) -> Mixture | None:
        """Return a layer's experts for this rank: those of rank 0 alone add the residual stream."""
        if mixture is None or self._is_first:
            return mixture
        return replace(mixture, residual=False)

    def _fuse(self, **_: object) -> list[tuple[slice, LayersNode | None]]:
        if self._peer is None:
            return [(slice(0, len(self._layers)), None)]
        return super()._fuse(peer=self._peer)

    def embed(self, tokens: mx.array) -> mx.array:
        """See `Decoder`. tokens: rank 0's (B, T), and zeros on the others."""
        return super().embed(self._group.all_sum(tokens))

    def _look_up(self, tokens: mx.array) -> mx.array:
        return self._group.all_sum(self.own_rows(tokens))

    def own_rows(self, tokens: mx.array) -> mx.array:
        """Return the rows (B, T, E) of the table that this rank has, and zeros for those of others."""
        own_vocabulary = self._vocabulary[self._group.rank]
        return self._ops.embed(tokens, self._table, self._dtype, own_vocabulary.start)

    def _add(
        self,
        x: mx.array,
        products: list[Product],
        post_norm: mx.array | None,
        epilogue: Epilogue,
        routed: mx.array | None = None,
    ) -> Residual:
        """See `Decoder`: this rank's products, then the sum of all ranks'. Rank 0 has x in its part."""
        ops = self._ops
        # This rank's part of the sum.
        (result, weight), *others = products
        if self._is_first and post_norm is None:  # else a norm of the sum comes before x
            partial = ops.linear_add(result, weight, x)
        else:
            partial = ops.linear(result, weight)
        for product in others:
            partial = ops.linear_add(product.x, product.weight, partial)
        if routed is not None:
            partial = partial + routed

        # The sum, which has x from rank 0 unless its norm comes first.
        total = self._group.all_sum(partial)
        if post_norm is not None:
            total = x + ops.rms_norm(total, post_norm, self.config.norm_eps)
        return scaled(total, epilogue)

    def _add_experts(
        self, residual: Residual, layer: LayerWeights, dense: Product | None, epilogue: Epilogue
    ) -> Residual:
        """See `Decoder`: each rank has a part of every expert."""
        ops = self._ops
        eps = self.config.norm_eps
        activation = self.config.family.activation
        branches = layer.branches
        x = residual.x
        assert layer.mlp_norm is not None
        assert layer.mixture is not None
        experts_factor = None
        if dense is not None:
            dense, experts_factor = gated(ops, residual, layer, dense, eps)

        # Both outputs in one sum, or the experts' alone.
        if branches is None or dense is None:
            partial = experts_output(ops, residual, layer, self.config)
            if experts_factor is not None:
                partial = partial * experts_factor
            if dense is not None:
                partial = ops.linear_add(dense.x, dense.weight, partial)
            total = self._group.all_sum(partial)
            # x is added once. With LayerNorms and with weighed branches the experts' output is without it
            # (`Mixture.residual` is False), so x comes here. With a norm of the sum it comes after that. In all other
            # layers rank 0's part has it.
            if self.config.family.norm == "layer" or experts_factor is not None:
                total = x + total
            if layer.mlp_post_norm is not None:
                total = x + ops.rms_norm(total, layer.mlp_post_norm, eps)
            return scaled(total, epilogue)

        # Each output has a norm of its own, so two sums, which go together (2B, T, E).
        assert layer.mlp_post_norm is not None
        expert_output = ops.experts(x, branches.before_experts, eps, layer.mixture, activation)
        parts = mx.concatenate([ops.linear(dense.x, dense.weight), expert_output])
        of_dense, of_experts = mx.split(self._group.all_sum(parts), 2)
        both = ops.rms_norm(of_dense, branches.after_dense, eps) + ops.rms_norm(of_experts, branches.after_experts, eps)
        return scaled(x + ops.rms_norm(both, layer.mlp_post_norm, eps), epilogue)


class SharedNorms:
    """Norms over the heads of all ranks, by a sum of squares. A rank has the weights of its heads.

    `TensorDecoder` takes them out of its layers, and runs its passes through `around`, which puts them back at the
    places where the layers would have had them: after the projections into attention, and after mixers.

    layers: the given ones, without them. H and Hkv: heads of this rank, D: head size.
    """

    def __init__(self, part: TensorPart, group: Group, layers: Sequence[LayerWeights]) -> None:
        self._part = part
        self._group = group
        self.layers = list(layers)
        self._heads: dict[int, list[mx.array]] = {}  # by layer: weights of queries (H * D,) and keys (Hkv * D,)
        self._inner: dict[int, mx.array] = {}  # by layer: (H * Dv,)
        for index, (layer, whole) in enumerate(zip(layers, part.whole.layers, strict=True)):
            spec = layer.attention
            mixer = layer.mixer
            if part.whole.family.qk_norm == "heads" and spec is not None:
                self._heads[index] = [norm for norm in (spec.q_norm, spec.k_norm) if norm is not None]
                layer = replace(layer, attention=replace(spec, q_norm=None, k_norm=None))
                self.layers[index] = layer
            joint = whole.mixer is not None and whole.mixer.sizes.kind == "ssm" and whole.mixer.norm_parts == 1
            if joint and mixer is not None and mixer.norm is not None:
                self._inner[index] = mixer.norm
                self.layers[index] = replace(layer, mixer=replace(mixer, norm=None))

    @property
    def arrays(self) -> list[mx.array]:
        """Weights of the norms; empty if none spans ranks."""
        return [*(norm for norms in self._heads.values() for norm in norms), *self._inner.values()]

    def around(self, kv: KVPass) -> KVPass:
        """Return a pass that normalizes what it attends to, and what it mixes."""
        if not self._heads and not self._inner:
            return kv
        return _NormedPass(kv, self)

    def of_heads(self, index: int, projected: Projections) -> Projections:
        """Normalize the queries and keys of projections (B, T, (H + 2 Hkv) * D), if they have such norms."""
        if index not in self._heads:
            return projected
        # The rank's queries and keys, the values after them.
        rows = stacked(projected)
        part = self._part
        layer = self._part.whole.layers[index]
        kv_heads, dim = part.whole.heads_of(layer)
        q_norm, k_norm = self._heads[index]
        q, k, v = mx.split(rows, [q_norm.size, q_norm.size + k_norm.size], axis=-1)

        # Squares of all ranks. K/V heads that several ranks have count once.
        sums = [_squares(q), _squares(k) / self._sharing(kv_heads)]
        both = self._group.all_sum(mx.concatenate(sums, axis=-1))  # (B, T, 2)
        means = both / mx.array([part.whole.heads * dim, kv_heads * dim], mx.float32)
        q_scale, k_scale = mx.split(mx.rsqrt(means + part.whole.norm_eps), 2, axis=-1)  # (B, T, 1)

        normed = [
            (x.astype(mx.float32) * scale).astype(rows.dtype) * norm
            for x, scale, norm in ((q, q_scale, q_norm), (k, k_scale, k_norm))
        ]
        return [mx.concatenate([*normed, v], axis=-1)]

    def of_mixer(self, index: int, x: mx.array, eps: float) -> mx.array:
        """Normalize a mixer's output (B, T, H * Dv), if all its heads have one norm."""
        if index not in self._inner:
            return x
        mixer = self._part.whole.layers[index].mixer
        assert mixer is not None
        mean = self._group.all_sum(_squares(x)) / mixer.sizes.inner
        return (x.astype(mx.float32) * mx.rsqrt(mean + eps)).astype(x.dtype) * self._inner[index]

    def _sharing(self, kv_heads: int) -> int:
        """Return the number of ranks that have this rank's K/V heads."""
        part = self._part
        own_heads = kv_range(part.heads, part.whole.heads, kv_heads)
        ranges = head_ranges(part.whole, part.split, part.unit)
        return sum(kv_range(heads, part.whole.heads, kv_heads) == own_heads for heads in ranges)


class _NormedPass:
    """A pass with norms after projections into attention, and after mixers."""

    def __init__(self, kv: KVPass, norms: SharedNorms) -> None:
        self._kv = kv
        self._norms = norms

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kv, name)

    def attend(self, layer: int, projected: Projections, spec: AttentionSpec) -> mx.array:
        return self._kv.attend(layer, self._norms.of_heads(layer, projected), spec)

    def mix(self, layer: int, x: mx.array, spec: MixerSpec) -> mx.array:
        return self._norms.of_mixer(layer, self._kv.mix(layer, x, spec), spec.norm_eps)


def _squares(x: mx.array) -> mx.array:
    """Return the sum of squares of each row (B, T, N) -> (B, T, 1)."""
    return mx.square(x.astype(mx.float32)).sum(axis=-1, keepdims=True)
