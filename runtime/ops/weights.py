"""Parameters of the fused operations: weight matrix, rotation, attention layout, mixture of experts, layer.

Shapes use N = output features, K = input features, G = group size, D = head dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Protocol

import mlx.core as mx

from headrace.runtime.ops.mixers import MixerSpec
from headrace.runtime.ops.passes import Pass, Phase

Projections = mx.array | list[mx.array]
"""q, k and v of new tokens: stacked, (B, T, (H + 2 Hkv) * D), or separate, (B, T, H * D) and two (B, T, Hkv * D)."""


class SampleRule(NamedTuple):
    """Token selection of a row: greedy at temperature 0, else sampled. Stages: see `runtime.sampling.sampler`."""

    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Weight:
    """A projection matrix of N rows and K columns, plain or affine-quantized as MLX stores it.

    Plain:      `data` (N, K) in float32, float16 or bfloat16; `scales` and `biases` are None.
    Quantized:  `data` (N, K * bits / 32) uint32; `scales`, `biases` (N, K / G); w = scale * q + bias. In the other
                modes of `mx.quantize` (mxfp4, nvfp4, mxfp8) q is a float, `scales` are bytes and there are no `biases`.
    `bias` (N,), if any, is added to the product.
    A stack of X matrices (see `Mixture`) has X in front of every shape; `rows` counts all of them.
    """

    data: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    bits: int = 0
    group_size: int = 0
    bias: mx.array | None = None
    mode: str = "affine"

    @property
    def quantized(self) -> bool:
        return self.scales is not None

    @property
    def rows(self) -> int:
        return prod(int(size) for size in self.data.shape[:-1])

    @property
    def columns(self) -> int:
        stored = int(self.data.shape[-1])
        return stored * 32 // self.bits if self.quantized else stored

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays of this weight."""
        return [a for a in (self.data, self.scales, self.biases, self.bias) if a is not None]

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Rope:
    """Rotary position embedding in the half-split layout (Su et al., arXiv:2104.09864).

    `periods` (dims / 2,) float32, with scaling schemes folded in: dimension pair i turns by position / periods[i]
    radians. The first `dims` <= D dimensions of a head are scaled by `amplitude` (1.0 except for YaRN) and rotated.
    """

    dims: int
    periods: mx.array
    amplitude: float = 1.0


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class AttentionSpec:
    """Attention layout of one layer: H query heads share Hkv key/value heads (GQA).

    `rope` is None in layers without position information. `q_norm`, `k_norm` are RMSNorm weights of each head, (D,),
    or of all heads together, (H * D,) and (Hkv * D,).
    norm_last: heads are normalized behind the rotation. growth (b, L): the query at position p is multiplied by
    1 + b * log(1 + floor(p / L)) (Llama 4, Ministral 3). `window`: positions that a query sees, its own included.
    `softcap` c soft-caps scores to c * tanh(score / c).
    `sinks` (H,) are scores that join each head's softmax without a value; never together with a softcap.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None = None
    q_norm: mx.array | None = None
    k_norm: mx.array | None = None
    norm_eps: float = 1e-6
    window: int | None = None
    softcap: float | None = None
    sinks: mx.array | None = None
    norm_last: bool = False
    growth: tuple[float, int] | None = None


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Mixture:
    """A feed-forward of X experts of size F, `active` of them per token (Shazeer et al., arXiv:1701.06538).

    The experts with the largest scores are used: the softmax of the router's logits, or their sigmoid (`sigmoid`).
    Their weights are the scores, divided by their sum if `normalized`, times `scale`. For the choice alone,
    `correction` (X,) is added to the scores, and only the experts of the best `groups[1]` of `groups[0]` groups take
    part, by the sum of their two largest (DeepSeek-V3, arXiv:2412.19437).
    """

    router: Weight  # (X, E)
    gate: Weight | None  # a stack of X: (F, E), or (2 F, E): gate above up; None for an activation that gates nothing
    up: Weight | None  # a stack of X: (F, E); None: below gate
    down: Weight  # a stack of X: (E, F)
    active: int
    normalized: bool
    sigmoid: bool = False
    correction: mx.array | None = None
    scale: float = 1.0
    groups: tuple[int, int] = (1, 1)

    @property
    def count(self) -> int:
        return self.router.rows

    @property
    def stacks(self) -> tuple[Weight, ...]:
        """Weights of which a token reads only the active experts."""
        return tuple(stack for stack in (self.gate, self.up, self.down) if stack is not None)


@dataclass(frozen=True, slots=True, eq=False)
class LatentWeights:
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

    @property
    def latent(self) -> int:
        """L, the size of a latent."""
        return int(self.norm.size)


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One decoder layer. E = width, F = feed-forward size.

    `qkv` and `gate_up` are single matrices unless their parts are quantized differently. Norms are None where a layer
    has none, and a layer may lack a feed-forward. A `mixture` of experts replaces `gate_up` and `down`, or has them as
    a shared expert beside the others. A `mixer` replaces attention, or stands beside it with the same input, if it has
    `mixer_ends`. A `gate` (H * D, E) multiplies what attention returns by the sigmoid of its product with the layer's
    input, and a `down_gate` (1, E) what `down` returns, with the feed-forward's.
    """

    attention: AttentionSpec | None
    input_norm: mx.array | None
    qkv: list[Weight]  # together ((H + 2 Hkv) * D, E), or the projections into the mixer
    output: Weight  # (E, H * D)
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

    @property
    def matrices(self) -> list[Weight]:
        """Weights that every token reads whole."""
        feed_forward = [*self.gate_up, *([] if self.down is None else [self.down])]
        gates = [gate for gate in (self.gate, self.down_gate) if gate is not None]
        router = [self.mixture.router] if self.mixture else []
        ends = self.mixer_ends or ()
        latent = [self.latent.q, self.latent.embed, self.latent.unembed] if self.latent else []
        latent = [part for part in latent if part]
        return [*self.qkv, *gates, *latent, self.output, *ends, *router, *feed_forward]


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
        /,
    ) -> mx.array:
        """Run the layers. x (B, T, E) -> (B, T, E). keys, values, firsts: per layer, see `attend`; written in place."""
        ...

    def run_pass(
        self, x: mx.array, rows: Pass, layers: slice, states: Sequence[Sequence[mx.array]], kept: int, /
    ) -> list[mx.array]:
        """Run these layers of the network for a pass. x (1, N, E) -> (1, N, E). See `attend_pass` and `mix_pass`.

        states: of each layer with a mixer, one per sequence. Behind x, the result has for each such layer the new
        states, and the mixer's inputs (1, kept, projected) of the first `kept` rows, if any.
        """
        ...
