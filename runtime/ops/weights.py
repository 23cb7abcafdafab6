"""Parameters of the fused operations: weights, rotation, attention layout, mixture of experts, token selection.

A network makes those of its layers at load, and passes them to `Ops`; `SampleRule` comes with each row of a pass. The
native kernels' form of `Rope`, `AttentionSpec` and `Mixture` is cached by identity (`native_plans`), so objects are
frozen, and reused from step to step; that of a `Weight` is a `PreparedWeight`. A new field that kernels do not know has
to be refused; else they would compute without it. `native.pages` does so for attention, `Mixture.is_composed` for
experts. Tests compare kernels with the reference: tests/runtime/ops/test_native_kernels.py with drawn fields of weights
and attention, test_native_experts.py with mixtures.

Shapes use N = output features, K = input features, G = group size, D = head dimension.
"""

from math import prod
from typing import Literal, NamedTuple

import mlx.core as mx
from msgspec import Struct

from headrace.runtime.ops.activations import Curve
from headrace.runtime.routing import Routing

Projections = list[mx.array]
"""q, k and v of new tokens: one array, (B, T, (H + 2 Hkv) * D), or three, (B, T, H * D) and two (B, T, Hkv * D)."""


class SampleRule(NamedTuple):
    """Token selection of a row: greedy at temperature 0, else sampled. Stages: see `runtime.sampling.sampler`."""

    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off


class Weight(Struct, frozen=True, eq=False, weakref=True):
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
        if self.quantized:
            return stored * 32 // self.bits
        return stored

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays of this weight."""
        return [a for a in (self.data, self.scales, self.biases, self.bias) if a is not None]

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays)


class LowRank(NamedTuple):
    """A product scale * B (A x) that is added to a weight's, from one of its rows on."""

    row: int
    a: mx.array  # (r, K)
    b: mx.array  # (rows, r)
    scale: float


class Rope(Struct, frozen=True, eq=False, weakref=True):
    """Rotary position embedding in the half-split layout (Su et al., arXiv:2104.09864).

    `periods` (dims / 2,) float32, with scaling schemes folded in: dimension pair i turns by position / periods[i]
    radians. The first `dims` <= D dimensions of a head are scaled by `amplitude` (1.0 except for YaRN) and rotated.
    """

    dims: int
    periods: mx.array
    amplitude: float = 1.0


class BlockChooser(Struct, frozen=True, eq=False):
    """An indexer that chooses whole blocks of entries for each K/V head; see `runtime.ops.block_sparse`."""

    heads: "AttentionSpec"  # of its queries, one for each K/V head, and of its keys, which all share
    block: int  # entries
    local: int  # blocks that are always chosen, a query's own the last of them; 1 or more


class AttentionSpec(Struct, frozen=True, eq=False, weakref=True):
    """Attention layout of one layer: H query heads share Hkv key/value heads (GQA).

    heads, kv_heads, head_dim: H, Hkv, D.
    scale: factor of the scores.
    rope: None in layers without position information.
    q_norm, k_norm: RMSNorm weights of each head, (D,), or of all heads together, (H * D,) and (Hkv * D,).
    norm_last: heads are normalized after the rotation, not before it.
    unit_norms: with `norm_last`, queries and keys are normalized without weights.
    v_norm: values are normalized, without weights.
    growth: (b, L, a): the query at position p is multiplied by 1 + b * log(1 + floor((p + a) / L)) (Llama 4,
        Ministral 3).
    window: positions that a query sees, its own included; None for all before it.
    chunked: a query sees the positions since the last multiple of `window`.
    softcap: c soft-caps scores to c * tanh(score / c).
    sinks: (H,), scores that join each head's softmax without a value; never together with a softcap.
    projects: parts of a token's row: queries only where the K/V of an earlier layer are read; without values where the
        keys, before their norm and rotation, are values, too.
    chosen: entries that a query attends to, at most, by `runtime.ops.indexed`; None for all.
    chooser: chooses them by whole blocks; None: they are chosen one by one.
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
    growth: tuple[float, int, int] | None = None
    v_norm: bool = False
    projects: Literal["q", "qk", "qkv"] = "qkv"
    chunked: bool = False
    unit_norms: bool = False
    chosen: int | None = None
    chooser: BlockChooser | None = None

    def first_seen(self, position: int) -> int:
        """Return the first position that the query at `position` sees."""
        if self.window is None:
            return 0
        if self.chunked:
            return position // self.window * self.window
        return max(0, position - self.window + 1)

    @property
    def appends(self) -> bool:
        """True if the layer has K/V of its own."""
        return self.projects != "q"


class LatentExperts(Struct, frozen=True, eq=False):
    """Projections of a token to the input of its experts (L numbers), and of their weighted sum back (Kimi K3)."""

    into: Weight  # (L, E)
    out: Weight  # (E, L)
    norm: mx.array | None  # (L,), of the sum; None: no norm
    eps: float


class Mixture(Struct, frozen=True, eq=False, weakref=True):
    """A feed-forward of X experts of size F, of which each token uses some.

    routing: how they are chosen and weighed; X = `routing.count`.
    correction: (X,) float32, added to the scores for the choice alone.
    router_norm: (E,), the router's own norm of the input.
    expert_scale: (X,), factors of the weights at last.
    residual: `Ops.experts` adds its input; else its output is the experts' alone.
    curve: in place of the network's activation.
    latent: experts read and write L numbers, and the E of their shapes is L; None: they read the router's input.
    """

    routing: Routing
    router: Weight  # (X, E)
    gate: Weight | None  # a stack of X: (F, E), or (2 F, E): gate above up; None for an activation that gates nothing
    up: Weight | None  # a stack of X: (F, E); None: below gate
    down: Weight  # a stack of X: (E, F)
    correction: mx.array | None = None
    router_norm: mx.array | None = None
    expert_scale: mx.array | None = None
    residual: bool = True
    curve: Curve | None = None
    latent: LatentExperts | None = None

    @property
    def is_composed(self) -> bool:
        """True if no kernel computes it at once."""
        routing = self.routing
        return self.curve is not None or routing.band > 0 or self.latent is not None or routing.routes_early

    @property
    def vectors(self) -> list[mx.array]:
        latent_norm = None if self.latent is None else self.latent.norm
        every = (self.correction, self.router_norm, self.expert_scale, latent_norm)
        return [vector for vector in every if vector is not None]

    @property
    def matrices(self) -> list[Weight]:
        """Weights that every token reads whole."""
        if self.latent is None:
            return [self.router]
        return [self.router, self.latent.into, self.latent.out]

    @property
    def stacks(self) -> tuple[Weight, ...]:
        """Weights of which a token reads only the active experts."""
        return tuple(stack for stack in (self.gate, self.up, self.down) if stack is not None)
