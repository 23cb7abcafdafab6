"""A rank of the decoder in tensor parallelism: parts of each layer, whose results are summed over the ranks.

A layer has two sums (Megatron-LM, arXiv:1909.08053), one if attention and feed-forward are parallel, three if experts
and a dense feed-forward have norms of their own, and one more for norms over the heads of all ranks. The residual
stream has the same bits on every rank.
Dimensions: B sequences, T new tokens, E hidden size, V vocabulary.
"""

from dataclasses import replace

import mlx.core as mx

from headrace.models.network.decoder import Decoder
from headrace.models.network.parameters import Parameters
from headrace.models.network.projections import Ends, Residual, gated
from headrace.models.network.shared_norms import SharedNorms
from headrace.models.network.tensor_part import TensorPart
from headrace.runtime.kv.cache import KVPass
from headrace.runtime.ops import LayersNode, LayerWeights, Mixture, Ops, Weight
from headrace.runtime.ops.kv_format import KVFormat
from headrace.runtime.ops.native_plans import kernels
from headrace.runtime.ranks.group import Group


class TensorDecoder(Decoder):
    """A rank's part of the decoder. Rank 0 has the residual stream in its partial sums, and all ranks their sum."""

    def __init__(
        self, part: TensorPart, parameters: Parameters, ops: Ops, dtype: mx.Dtype, kv: KVFormat | None, group: Group
    ) -> None:
        self._group = group
        self._first = part.rank == 0
        self._peer: kernels.Peer | None = None  # that adds the other parts within the node of all layers
        super().__init__(part.config, parameters, ops, dtype, kv)
        self._norms = SharedNorms(part, group, self._layers)
        self._layers = [replace(layer, mixture=self._own(layer.mixture)) for layer in self._norms.layers]
        self._peer = None if self._norms.arrays else group.peer
        self._layer_groups = self._fuse(ops)
        self._vocabulary = part.split_vocabulary
        self.vocab_size = part.whole.vocab_size

    def follow(self, kv: KVPass) -> list[mx.array]:
        """Run rank 0's pass; return what it evaluates."""
        x = self.layers(self.embed(mx.zeros((1, sum(row.count for row in kv.rows)), mx.uint32)), kv)
        kv.advance()
        ends = 0
        chosen = list[int]()
        for row in kv.rows:
            ends += row.count
            chosen += range(ends - row.logits, ends)
        if not chosen:
            return [x] if any(row.hidden for row in kv.rows) else kv.arrays
        rows = x[0] if chosen == list(range(x.shape[1])) else x[0, mx.array(chosen)]
        return [self.logits(rows[:, None])]

    def all_logits(self, x: mx.array) -> mx.array:
        """Return the logits (B, T, V) of every position of x (B, T, E), on rank 0; the others evaluate the result."""
        return self._at_once(self._group.gather_columns(super().all_logits(x), [len(own) for own in self._vocabulary]))

    def layers(self, x: mx.array, kv: KVPass) -> mx.array:
        out = super().layers(x, self._norms.around(kv))
        rows = kv.rows
        drafts = any(row.hidden for row in rows) and not any(row.logits for row in rows)
        return self._at_once(out) if drafts else out

    def _at_once(self, x: mx.array) -> mx.array:
        """Hand x to the device, with a draft head: passes of a step are evaluated in their order on every rank."""
        if self.draft_head is not None:
            mx.async_eval(x)
        return x

    @property
    def _arrays(self) -> list[mx.array]:
        return [*super()._arrays, *self._norms.arrays]

    def _own(self, mixture: Mixture | None) -> Mixture | None:
        return mixture if mixture is None or self._first else replace(mixture, residual=False)

    def _fuse(self, ops: Ops, **_: object) -> list[tuple[slice, LayersNode | None]]:
        if self._peer is None:
            return [(slice(0, len(self._layers)), None)]
        return super()._fuse(ops, peer=self._peer)

    def embed(self, tokens: mx.array) -> mx.array:
        """See `Decoder`. tokens: rank 0's (B, T), and zeros on the others."""
        return super().embed(self._group.all_sum(tokens))

    def _look_up(self, tokens: mx.array) -> mx.array:
        return self._group.all_sum(self.own_rows(tokens))

    def own_rows(self, tokens: mx.array) -> mx.array:
        """Return the rows (B, T, E) of the table that this rank has, and zeros for those of others."""
        own = self._vocabulary[self._group.rank]
        return self._ops.embed(tokens, self._table, self._dtype, own.start)

    def _attend_and_feed(self, at: Residual, kv: KVPass, index: int, ends: Ends) -> Residual:
        x = self._fed(at, kv, index)
        return Residual(x if ends.scalar is None else x * ends.scalar)

    def _fed(self, at: Residual, kv: KVPass, index: int) -> mx.array:
        ops = self._ops
        layer = self._layers[index]
        x = at.x
        at = at._replace(x=self._centred(at.x))
        heads, beside = self._heads(at, kv, index)
        parallel = self.config.family.parallel
        after = layer.attention_post_norm
        partial = self._partial(x, heads, layer.output, after)
        if beside is not None and layer.mixer_ends is not None:
            partial = ops.linear_add(beside, layer.mixer_ends[1], partial)
        if not parallel:
            x = self._joined(x, partial, after)
        if layer.mixture is not None:
            return self._mixture(x, layer, layer.mixture)
        if layer.down is None:
            return x
        inner = self._feed_forward(at if parallel else Residual(self._centred(x)), layer)  # (B, T, F)
        if parallel:
            return self._group.all_sum(ops.linear_add(inner, layer.down, partial))
        after = layer.mlp_post_norm
        return self._joined(x, self._partial(x, inner, layer.down, after), after)

    def _partial(self, x: mx.array, inner: mx.array, weight: Weight, after: mx.array | None) -> mx.array:
        """Return this rank's product, on rank 0 plus x unless a norm comes first."""
        if self._first and after is None:
            return self._ops.linear_add(inner, weight, x)
        return self._ops.linear(inner, weight)

    def _joined(self, x: mx.array, partial: mx.array, after: mx.array | None) -> mx.array:
        """Return x plus the ranks' products, behind the norm `after`, if any."""
        total = self._group.all_sum(partial)
        return total if after is None else x + self._ops.rms_norm(total, after, self.config.norm_eps)

    def _mixture(self, x: mx.array, layer: LayerWeights, mixture: Mixture) -> mx.array:
        ops = self._ops
        eps = self.config.norm_eps
        activation = self.config.family.activation
        branches = layer.branches
        assert layer.mlp_norm is not None
        dense = None  # (B, T, F)
        if layer.down is not None:
            dense = gated(ops, Residual(x), layer, self._feed_forward(Residual(x), layer), eps)
        if branches is None or dense is None or layer.down is None:
            partial = ops.experts(x, layer.mlp_norm, eps, mixture, activation)
            return self._group.all_sum(
                partial if dense is None or layer.down is None else ops.linear_add(dense, layer.down, partial)
            )
        assert layer.mlp_post_norm is not None
        own = ops.experts(x, branches.before_experts, eps, mixture, activation)
        dense, own = mx.split(self._group.all_sum(mx.concatenate([ops.linear(dense, layer.down), own])), 2)
        both = ops.rms_norm(dense, branches.after_dense, eps) + ops.rms_norm(own, branches.after_experts, eps)
        return x + ops.rms_norm(both, layer.mlp_post_norm, eps)
