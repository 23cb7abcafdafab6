"""What the fused operations take besides activations: a weight matrix, a rotation, an attention layout, a layer.

Plain data. Shapes use N = output features, K = input features, G = group size, D = head dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Protocol

import mlx.core as mx

from headrace.runtime.ops.passes import Pass, Phase

Projections = mx.array | list[mx.array]
"""q, k and v of new tokens: one above the other, (B, T, (H + 2 Hkv) * D), or, from weights that could not be stacked,
the three apart, (B, T, H * D) and twice (B, T, Hkv * D)."""


class SampleRule(NamedTuple):
    """Token selection of a row: greedy at temperature 0, else sampled. The stages: `runtime.sampling.sampler`."""

    temperature: float = 0.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0  # 1: all
    min_p: float = 0.0  # 0: all


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Weight:
    """A projection matrix of N rows and K columns, plain or affine-quantized as MLX stores it.

    Plain:      `data` (N, K) in float32, float16 or bfloat16; `scales` and `biases` are None.
    Quantized:  `data` (N, K * bits / 32) uint32; `scales`, `biases` (N, K / G); w = scale * q + bias. In the other
                modes of `mx.quantize` (mxfp4, nvfp4, mxfp8) q is a float, `scales` are bytes and there are no `biases`.
    `bias` (N,) is added to the product where the model has one.
    A stack of X matrices (see `Mixture`) has X in front of every shape; `rows` counts those of all.
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
        """Every array this weight holds (to evaluate, to count)."""
        return [a for a in (self.data, self.scales, self.biases, self.bias) if a is not None]

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Rope:
    """Rotary position embedding in the half-split layout (Su et al., arXiv:2104.09864).

    `periods` (dims / 2,) float32: dimension pair i turns by position / periods[i] radians; every scaling
    scheme is already folded in. `dims` <= D leading dimensions of a head are rotated, scaled by `amplitude`
    first (1.0 except for YaRN).
    """

    dims: int
    periods: mx.array
    amplitude: float = 1.0


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class AttentionSpec:
    """How one layer turns fused projections into attention: H query heads share Hkv key/value heads (GQA).

    `rope` is None in layers without position information. `q_norm`, `k_norm` (D,) are per-head RMSNorm
    weights. `window` keeps a query's last `window` positions, itself included. `softcap` c soft-caps scores to
    c * tanh(score / c). `sinks` (H,) are scores that take their share of each head's softmax and add nothing;
    no model has them beside a softcap.
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


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Mixture:
    """A feed-forward of X experts of size F, `active` of them for each token (Shazeer et al., arXiv:1701.06538).

    The router's largest logits name them, and its softmax over all experts gives their shares of the sum; where
    `normalized`, divided by what the chosen ones have together.
    """

    router: Weight  # (X, E)
    gate: Weight  # a stack of X: (F, E)
    up: Weight  # the same
    down: Weight  # a stack of X: (E, F)
    active: int
    normalized: bool

    @property
    def count(self) -> int:
        return self.router.rows

    @property
    def stacks(self) -> tuple[Weight, Weight, Weight]:
        """What only the active share of is read."""
        return self.gate, self.up, self.down


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One decoder layer. E = width, F = feed-forward size.

    `qkv` and `gate_up` are single matrices unless their parts are quantized differently. The post norms are Gemma's.
    Where there is a `mixture` of experts, it stands in for `gate_up` and `down`.
    """

    attention: AttentionSpec
    input_norm: mx.array
    qkv: list[Weight]  # together ((H + 2 Hkv) * D, E)
    output: Weight  # (E, H * D)
    attention_post_norm: mx.array | None
    mlp_norm: mx.array
    gate_up: list[Weight]  # together (2 F, E)
    down: Weight | None  # (E, F)
    mlp_post_norm: mx.array | None
    mixture: Mixture | None = None

    @property
    def matrices(self) -> list[Weight]:
        """What every token reads the whole of."""
        feed_forward = [*self.gate_up, *([] if self.down is None else [self.down])]
        return [*self.qkv, self.output, *([self.mixture.router] if self.mixture else feed_forward)]


class LayersNode(Protocol):
    """Layers at once. Only a cache calls it, which owns what they append to; a network passes it on."""

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
        """x (B, T, E) -> the same. `attend`'s buffers of every layer, written in place; each one's first position."""
        ...

    def run_pass(self, x: mx.array, rows: Pass, layers: slice, /) -> mx.array:
        """x (1, N, E) of a pass -> the same, through these layers of the network. See `attend_pass`."""
        ...
