"""A rank of the decoder in tensor parallelism: parts of each layer, whose results are summed over the ranks.

A layer has two sums (Megatron-LM, arXiv:1909.08053), one if attention and feed-forward are parallel, three if experts
and a dense feed-forward have norms of their own, and one more for norms over the heads of all ranks. The residual
stream has the same bits on every rank.

`loading.rank_part` makes it. Rank 0's engine runs passes as with any network, the others run `follow` for each pass.
Every rank has to call the group's sums in the same order: a sum that one leaves out stops all of them. Methods replace
`Decoder`'s, whose module lists them. The constructor takes its parameters, for this rank's `part`; `group` connects the
ranks.
Guard: tests/models/network/test_ranks.py compares every family with one machine.

Dimensions: B sequences, T new tokens, E hidden size, V vocabulary.
"""

import mlx.core as mx
from msgspec.structs import replace

from headrace.models.network.decoder import Decoder
from headrace.models.network.parameters import Parameters
from headrace.models.network.projections import Epilogue, Product, Residual, experts_output, gated, scaled
from headrace.models.network.shared_norms import SharedNorms
from headrace.models.network.tensor_part import TensorPart
from headrace.runtime.kv.cache import KVPass
from headrace.runtime.ops import LayersNode, LayerWeights, Mixture, Ops
from headrace.runtime.ops.kv_format import KVFormat
from headrace.runtime.ops.native_plans import kernels
from headrace.runtime.ranks.group import Group


class TensorDecoder(Decoder):
    """A rank's part of the decoder. Rank 0 has the residual stream in its partial sums, and all ranks their sum."""

    def __init__(
        self, part: TensorPart, parameters: Parameters, ops: Ops, dtype: mx.Dtype, kv: KVFormat | None, group: Group
    ) -> None:
        self._group = group
        self._is_first = part.rank == 0
        # Adds the other parts within the node of all layers. Norms over the heads of all ranks need sums between them.
        self._peer: kernels.Peer | None = None
        super().__init__(part.config, parameters, ops, dtype, kv)
        self._norms = SharedNorms(part, group, self._layers)
        self._layers = [replace(layer, mixture=self._own(layer.mixture)) for layer in self._norms.layers]
        self._peer = None if self._norms.arrays else group.peer
        self._layer_groups = self._fuse(ops)
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
            # Else rank 0's part has x, as `Mixture.residual` tells, or a norm of the sum comes before x.
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
