"""Weights of a decoder layer, and several layers as one node.

`models/network/layers.py` fills them from a checkpoint, and `Decoder._block` runs them one operation after the other.
`Ops.fuse` makes one node of layers that the native kernels support as a whole (`native_plans.layer_plan`). A new field
of weights has to be in `matrices` or `vectors`, which sums of bytes are made of. Any new field has to be in
`layer_plan`: used there, or a reason for None; else the kernels compute without it.

Shapes use E = width, F = feed-forward size, H = heads, D = head dimension.

Guard: tests/parity/test_mlx_lm_families.py, with the native kernels.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import mlx.core as mx
from msgspec import Struct

from headrace.runtime.ops.activations import Curve
from headrace.runtime.ops.mixers import MixerSpec
from headrace.runtime.ops.passes import Pass, Phase
from headrace.runtime.ops.weights import AttentionSpec, Mixture, Weight


class IndexerWeights(Struct, frozen=True, eq=False):
    """An indexer of I heads of size D, without the weights of its input, and the LayerNorm of its keys (D,)."""

    queries: Weight  # (I * D, Q), of the queries' latent
    norm: mx.array
    norm_bias: mx.array


class LatentWeights(Struct, frozen=True, eq=False):
    """Attention over latents (MLA, arXiv:2405.04434) with absorbed products: all queries share one K/V head.

    An entry is a rotated key of size R and a latent of size L, which is key and value. `AttentionSpec` has heads of
    R + L, and the rotation of the first R numbers.
    """

    q_norm: mx.array | None  # (Q,); None: queries are projected at once
    q: Weight | None  # ((R + N) * H, Q)
    norm: mx.array  # (L,)
    embed: Weight  # a stack of H: (L, N), of the queries' other parts
    unembed: Weight  # a stack of H: (V, L), of the attended latents
    eps: float
    indexer: IndexerWeights | None = None  # the layer's last two projections are then its weights and its key

    @property
    def latent(self) -> int:
        """L, the size of a latent."""
        return int(self.norm.size)

    @property
    def matrices(self) -> list[Weight]:
        weights = [self.q, self.embed, self.unembed]
        if self.indexer is not None:
            weights.append(self.indexer.queries)
        return [weight for weight in weights if weight is not None]

    @property
    def vectors(self) -> list[mx.array]:
        vectors = [self.q_norm, self.norm]
        if self.indexer is not None:
            vectors += [self.indexer.norm, self.indexer.norm_bias]
        return [vector for vector in vectors if vector is not None]


class LayerInput(Struct, frozen=True, eq=False):
    """A layer's own input of each token (P,): x + norm(projection @ (gelu(gate @ x) * input))."""

    gate: Weight  # (P, E)
    projection: Weight  # (E, P)
    norm: mx.array  # (E,)


class BranchNorms(NamedTuple):
    """Norms (E,) of experts beside a dense feed-forward: after the dense one, before and after the experts."""

    after_dense: mx.array
    before_experts: mx.array
    after_experts: mx.array


class SmallValues(Struct, frozen=True):
    """Values that are smaller than keys. K/V have heads of one size, so zeros follow each value there."""

    size: int
    scale: float  # factor of all values


class LoopGate(Struct, frozen=True, eq=False):
    """Gates of heads between the entries of the first loop and those of a later one (IQuest Coder).

    The share of the first is the sigmoid of a head's rotated query times its weights.
    """

    weight: mx.array  # (H, D)
    bias: mx.array  # (H,)
    first: AttentionSpec  # of queries alone, over the first loop's entries


class AltUpWeights(NamedTuple):
    """Alternating updates of S streams, and a low-rank product of R next to attention.

    Coefficients are in float32, one for each number of the router.
    """

    router: Weight  # (S, E)
    router_norm: mx.array  # (E,)
    prediction: mx.array  # (S, S, S): of the stream that is predicted, of the one that it is predicted from
    correction: mx.array  # (S, S): of the stream that is corrected
    scale: mx.array  # (E,), of the first stream before the gate of the layer's own input
    left: Weight  # (R, E)
    right: Weight  # (E, R)
    laurel_norm: mx.array  # (E,), of that product


class ScanWeights(Struct, frozen=True, eq=False):
    """Products between the convolution of a Mamba layer and its scan, of C channels with a state of N numbers each."""

    into: Weight  # (R + 2 N, C), to the rank of steps, B and C
    step: Weight  # (C, R), with a bias
    norms: tuple[mx.array, ...] | None  # of the three: ones, since these norms have no weights; None: no norms
    norm_eps: float


class TimeMixWeights(Struct, frozen=True, eq=False):
    """Products of the first half of an RWKV-7 layer, of width E; its mixers have the vectors.

    Pairs are products of a low rank, (R, E) and (E, R), the second with a bias but that of gates.
    """

    receptance: Weight  # (E, E)
    key: Weight  # (E, E)
    value: Weight  # (E, E)
    decay: tuple[Weight, Weight]
    rate: tuple[Weight, Weight]
    value_mix: tuple[Weight, Weight] | None  # share of the first layer's values; None in that layer
    gate: tuple[Weight, Weight]

    @property
    def matrices(self) -> list[Weight]:
        pairs = (self.decay, self.rate, self.gate, self.value_mix or ())
        return [self.receptance, self.key, self.value, *(weight for pair in pairs for weight in pair)]


class ResidualMix(NamedTuple):
    """Weights of a mixture of residual sums. The logit of a sum is norm(sum) . projection."""

    norm: mx.array  # (E,)
    projection: mx.array  # (E,)


class LayerWeights(Struct, frozen=True, eq=False):
    """One decoder layer. E = width, F = feed-forward size.

    Parts are None where a layer has none: norms, the feed-forward, or all that mixes tokens.

    attention: layout; None without attention.
    qkv: projections of the input: q, k and v, then a chooser's queries and keys; or those into the mixer. A single
        matrix unless the parts are quantized differently.
    output: projection of the attended heads, or out of the mixer.
    gate_up, down: of the dense feed-forward. `gate_up` is one matrix as well, unless quantized differently.
    mixture: of experts, in place of `gate_up` and `down`; if these are there, too, they are a shared expert.
    mixer: in place of attention; beside it, with the same input, if there are `mixer_ends`.
    gate: (H * D, E); the sigmoid of its product with the layer's input multiplies the attended heads.
    down_gate: (1, E); the same of the feed-forward's input, for the output of `down`. Or (2, E): a softmax weighs the
        outputs of the mixture and of `down`.
    latent: of attention over latents; `qkv` then gives queries or their latent, an entry, and an indexer's inputs.
    branches: norms of experts and dense feed-forward before they are added.
    own_input: of each token, from a table of the layer's own.
    scalar: (1,), a factor of the layer's output.
    mixer_gates: second matrices of z (None: it has one matrix) and a. `qkv` then gives R numbers of each that has two,
        in [q, k, v | z | a | b].
    curve: in place of the network's activation.
    mixes: of residual sums, before attention or a mixer, and before the feed-forward.
    loop_gate: of a layer in a later loop than the first, which attends to both.
    later_mixers: further states of the layer, each with an index of its own after all layers in `KVShape`.
    scan: between the convolution `mixer` and the scan after it, the only later mixer.
    inner_norms: of the attended heads together, and of the dense feed-forward's inner values (BitNet).
    time_mix: of RWKV-7; `mixer` gives its six inputs, then follow the recurrence, and the feed-forward's input.
    """

    attention: AttentionSpec | None
    input_norm: mx.array | None
    # Together ((H + 2 Hkv) * D, E), then those into a chooser's queries and keys; or the projections into the mixer.
    qkv: list[Weight]
    output: Weight | None  # (E, H * D)
    attention_post_norm: mx.array | None
    mlp_norm: mx.array | None
    gate_up: list[Weight]  # together (2 F, E); up alone, (F, E), for an activation that gates nothing
    down: Weight | None  # (E, F)
    mlp_post_norm: mx.array | None
    mixture: Mixture | None = None
    mixer: MixerSpec | None = None
    gate: Weight | None = None
    down_gate: Weight | None = None
    latent: LatentWeights | None = None
    mixer_ends: tuple[Weight, Weight] | None = None  # projections into a mixer beside attention, and out of it
    branches: BranchNorms | None = None
    own_input: LayerInput | None = None
    scalar: mx.array | None = None
    mixer_gates: tuple[Weight | None, Weight] | None = None  # (Hv * Dv, R) of z, (Hv * Dk, R) of a
    curve: Curve | None = None
    input_norm_bias: mx.array | None = None  # (E,), of a LayerNorm
    head_norms: tuple[mx.array, mx.array] | None = None  # LayerNorms of queries (H, D) and keys (Hkv, D)
    mlp_norm_bias: mx.array | None = None
    values: SmallValues | None = None  # None: of the size of keys
    altup: AltUpWeights | None = None
    mixes: tuple[ResidualMix, ResidualMix] | None = None
    loop_gate: LoopGate | None = None
    later_mixers: tuple[MixerSpec, ...] = ()
    scan: ScanWeights | None = None
    time_mix: TimeMixWeights | None = None
    inner_norms: tuple[mx.array, mx.array] | None = None  # (H * D,), (F,)

    @property
    def vectors(self) -> list[mx.array]:
        """All weights that are no matrices."""
        vectors = [self.input_norm, self.attention_post_norm, self.mlp_norm, self.mlp_post_norm, self.scalar]
        vectors += [self.input_norm_bias, self.mlp_norm_bias]
        if self.attention is not None:
            vectors += [self.attention.q_norm, self.attention.k_norm, self.attention.sinks]
            chooser = self.attention.chooser
            if chooser is not None:
                vectors += [chooser.heads.q_norm, chooser.heads.k_norm]
        for part in (self.mixer, *self.later_mixers, self.mixture, self.latent):
            if part is not None:
                vectors += part.vectors
        for norms in (self.head_norms, self.branches, self.inner_norms):
            if norms is not None:
                vectors += norms
        if self.own_input is not None:
            vectors.append(self.own_input.norm)
        if self.altup is not None:
            vectors += [part for part in self.altup if isinstance(part, mx.array)]
        if self.loop_gate is not None:
            vectors += [self.loop_gate.weight, self.loop_gate.bias]
        for mix in self.mixes or ():
            vectors += mix
        # Two fields may have one array: a parallel layer's halves have one norm.
        return list({id(vector): vector for vector in vectors if vector is not None}.values())

    @property
    def matrices(self) -> list[Weight]:
        """Weights that every token reads whole."""
        matrices = [*self.qkv, self.gate, self.down_gate]
        if self.latent is not None:
            matrices += self.latent.matrices
        matrices.append(self.output)
        for pair in (self.mixer_ends, self.mixer_gates):
            if pair is not None:
                matrices += pair
        if self.mixture is not None:
            matrices += self.mixture.matrices
        matrices += [*self.gate_up, self.down]
        if self.own_input is not None:
            matrices += [self.own_input.gate, self.own_input.projection]
        if self.altup is not None:
            matrices += [self.altup.router, self.altup.left, self.altup.right]
        if self.scan is not None:
            matrices += [self.scan.into, self.scan.step]
        if self.time_mix is not None:
            matrices += self.time_mix.matrices
        return [matrix for matrix in matrices if matrix is not None]


class LayersNode(Protocol):
    """Several layers as one node. Called by the cache that owns the buffers."""

    def __call__(
        self,
        x: mx.array,
        keys: list[mx.array],
        values: list[mx.array],
        offset: int,
        firsts: Sequence[int],
        phase: Phase,
        wanted: int,
        /,
    ) -> mx.array:
        """Run the layers for one sequence. x (1, T, E) -> (1, wanted, E).

        keys, values: buffers of each layer, written in place; see `attend`.
        offset: position of the first row of x.
        firsts: position of the first row of each layer's buffers.
        wanted: rows of x of which the output is used, from the first on.
        """
        ...

    def run_pass(
        self,
        x: mx.array,
        rows: Pass,
        layers: slice,
        states: Sequence[Sequence[mx.array]],
        kept_rows: int,
        wanted: int,
        /,
    ) -> list[mx.array]:
        """Run these layers of the network for a pass. x (1, N, E) -> (1, wanted, E). See `attend_pass` and `mix_pass`.

        Of rows that are not wanted, the last layer appends K/V and advances states only.

        states: of each layer with a mixer, one per sequence. After x, the result has for each such layer the new
        states, and the mixer's inputs (1, kept_rows, projected) of the first `kept_rows`, if any.
        """
        ...
