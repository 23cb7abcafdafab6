"""Operations of a decoder layer, with two implementations: stock MLX (`reference`) and CPU kernels (`native`).

Networks call an `Ops`. `reference` runs everywhere; `native` runs headrace's CPU kernels as nodes of MLX's graph, if
they were built. `select` chooses at load; HEADRACE_KERNELS=reference forces stock MLX, HEADRACE_KERNELS=avx2
and the like one of the compiled instruction sets.

Both are modules, so a new operation is a function of the same name in `reference.py` and `native.py`, and a method of
`Ops`; mypy compares the signatures in `select`. `Ops` has the shapes, `reference` defines each result, and
tests/runtime/ops/test_native_kernels.py compares. The other files here: parameters and shapes (weights, layer_weights,
mixers, passes, kv_format), parts of `reference`, and Metal kernels with their stock twins.
"""

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from headrace.runtime.config import environment
from headrace.runtime.errors import UsageError
from headrace.runtime.ops import metal, native, reference
from headrace.runtime.ops.activations import BoundedSilu, Curve, GatedCurve, SituGate, SparseGelu, Xielu
from headrace.runtime.ops.kv_format import KVFormat
from headrace.runtime.ops.layer_weights import (
    AltUpWeights,
    BranchNorms,
    IndexerWeights,
    LatentWeights,
    LayerInput,
    LayersNode,
    LayerWeights,
    LoopGate,
    ResidualMix,
    ScanWeights,
    SmallValues,
    TimeMixWeights,
)
from headrace.runtime.ops.mixers import MixerSizes, MixerSpec, WkvVectors
from headrace.runtime.ops.native_plans import kernels
from headrace.runtime.ops.passes import BLOCK, KVGroup, KVKind, KVStore, Pass, Phase, SequenceRows
from headrace.runtime.ops.weights import (
    AttentionSpec,
    BlockChooser,
    LatentExperts,
    LowRank,
    Mixture,
    Projections,
    Rope,
    SampleRule,
    Weight,
)


def _differing() -> str:
    from headrace.runtime.ops.metal_check import differing  # late: for Metal alone

    return differing()


metal.checks[:] = [_differing]  # registered here, since `metal_check` imports modules that import `metal`

__all__ = [
    "BLOCK",
    "AltUpWeights",
    "AttentionSpec",
    "BlockChooser",
    "BoundedSilu",
    "BranchNorms",
    "Curve",
    "GatedCurve",
    "IndexerWeights",
    "KVGroup",
    "KVKind",
    "KVStore",
    "LatentExperts",
    "LatentWeights",
    "LayerInput",
    "LayerWeights",
    "LayersNode",
    "LoopGate",
    "LowRank",
    "MixerSizes",
    "MixerSpec",
    "Mixture",
    "Ops",
    "Pass",
    "Phase",
    "Projections",
    "ResidualMix",
    "Rope",
    "SampleRule",
    "ScanWeights",
    "SequenceRows",
    "SituGate",
    "SmallValues",
    "SparseGelu",
    "TimeMixWeights",
    "Weight",
    "WkvVectors",
    "Xielu",
    "describe",
    "select",
]


class Ops(Protocol):
    """Operations of a decoder layer, with shapes and units. Docstrings of implementations tell only what they add.

    B = sequences, T = new tokens of each, N and K = rows and columns of a weight (outputs and inputs), E = model width,
    F = inner width of a feed-forward, V = vocabulary, H and Hkv = query and key-value heads, D = head size.

    Activations and results have the compute dtype, and results are lazy, where nothing else is said. Positions and
    offsets count tokens from the beginning of a sequence.
    """

    @property
    def name(self) -> str: ...

    # -- before use: weights and K/V formats

    def prepare(self, weight: Weight, dtype: mx.Dtype, *, exact: bool = False) -> Weight:
        """Return a weight in the form that these operations read fastest.

        dtype: of the activations that it multiplies.
        exact: these are multiplied as they are, and never rounded.
        """
        ...

    def add_low_rank(self, weight: Weight, products: Sequence[LowRank]) -> list[mx.array] | None:
        """Add products to all later ones of a prepared weight, once.

        Return the arrays that they read; None if the caller has to add them.
        """
        ...

    def kv_format(self, compute: mx.Dtype) -> KVFormat:
        """Return the format of K/V that are not packed. compute: dtype of activations."""
        ...

    def supports_packed(self, head_dim: int) -> bool:
        """Return whether attention reads packed K/V of this head size."""
        ...

    def packed_format(self, kv: KVFormat, head_dim: int, /) -> KVFormat:
        """Return the layout in which these operations read a packed format."""
        ...

    # -- rows of tokens: products, norms, activations, experts

    def embed(self, tokens: mx.array, table: Weight, dtype: mx.Dtype, first: int | None = None) -> mx.array:
        """Return rows of the embedding table (V, E) in `dtype`: tokens (B, T) -> (B, T, E).

        first: the token of the table's first row, if it has a part of the vocabulary; rows of other tokens are zeros.
        """
        ...

    def linear(self, x: mx.array, w: Weight) -> mx.array:
        """Return x @ w.T, plus the weight's bias if it has one: (B, T, K) -> (B, T, N)."""
        ...

    def linear_add(self, x: mx.array, w: Weight, residual: mx.array) -> mx.array:
        """Return residual + `linear`: x (B, T, K), residual (B, T, N) -> (B, T, N)."""
        ...

    def linear_add_norm(
        self,
        x: mx.array,
        w: Weight,
        residual: mx.array,
        post_norm: mx.array | None,
        norm: mx.array | None,
        eps: float,
        scalar: mx.array | None = None,
        /,
    ) -> tuple[mx.array, mx.array | None]:
        """Return `add_norms` of `linear`: x (B, T, K), w (E, K)."""
        ...

    def add_norms(
        self,
        x: mx.array,
        residual: mx.array,
        post_norm: mx.array | None,
        norm: mx.array | None,
        eps: float,
        scalar: mx.array | None = None,
        /,
    ) -> tuple[mx.array, mx.array | None]:
        """Return the sum (residual + x) * scalar and its norm, (B, T, E) each.

        x, residual: (B, T, E).
        post_norm: (E,), of x before the sum; None: no norm.
        norm: (E,), of the sum. The second result is None without, and where the next projection applies it.
        eps: of both norms.
        scalar: (1,); None: 1.
        """
        ...

    def rms_norm(self, x: mx.array, weight: mx.array, eps: float) -> mx.array:
        """Normalize by the root mean square over the last axis: x (..., E), weight (E,) (arXiv:1910.07467)."""
        ...

    def layer_norm(self, x: mx.array, weight: mx.array, bias: mx.array | None, eps: float) -> mx.array:
        """Normalize by mean and deviation over the last axis: x (..., E), weight and bias (E,) (arXiv:1607.06450)."""
        ...

    def norm_linear(self, x: mx.array, norm: mx.array | None, eps: float, w: Weight) -> mx.array:
        """Return `linear` of `rms_norm`, or of x without a norm: x (B, T, K), norm (K,) -> (B, T, N)."""
        ...

    def glu(self, gate: mx.array, up: mx.array, activation: str | GatedCurve) -> mx.array:
        """Return act(gate) * up, a gated linear unit (Shazeer, arXiv:2002.05202): (B, T, F) twice -> (B, T, F).

        activation: a key of `runtime.ops.activations.ACTIVATIONS`, or a curve.
        """
        ...

    def activate(self, x: mx.array, activation: str) -> mx.array:
        """Apply an activation of `glu` by itself, as with an up of ones."""
        ...

    def norm_glu(self, x: mx.array, norm: mx.array | None, eps: float, w: Weight, activation: str | Curve) -> mx.array:
        """Return `norm_linear` and `glu` in one: x (B, T, E), norm (E,) -> (B, T, F).

        w: (2 F, E), gate above up; (F, E) for activations that gate nothing: "relu2", "tanh_gelu", "erf_gelu", xIELU.
        """
        ...

    def experts(
        self,
        x: mx.array,
        norm: mx.array,
        eps: float,
        m: Mixture,
        activation: str,
        normed: mx.array | None = None,
        entered: mx.array | None = None,
        /,
    ) -> mx.array:
        """Return x + the output of the experts for norm(x), without x unless `m.residual`: (B, T, E) -> (B, T, E).

        norm: (E,).
        eps: of the norm, and of the router's own.
        activation: of the experts, unless they have a curve.
        normed: (B, T, E), norm(x), if it is there already.
        entered: (B, T, E), the router's input, if `m.routing.routes_early`.
        """
        ...

    def expert_linear(self, x: mx.array, indices: mx.array, stack: Weight, experts: int, /) -> mx.array:
        """Return products of rows with the matrices at their indices: x (M, K), indices (...) -> (..., N).

        indices: M times as many as each row has, those of a row together.
        stack: `experts` matrices (N, K).
        """
        ...

    def join_experts(self, gate: Weight, up: Weight) -> tuple[Weight, Weight | None]:
        """Return stacks of matrices (F, E) as one of (2 F, E), gate above up, and None; or both as they are."""
        ...

    # -- attention over a sequence's own buffers

    def grow(self, buffer: mx.array, capacity: int) -> mx.array:
        """Return a K/V buffer (B, Hkv, entries, D) with room for `capacity` entries."""
        ...

    def attend(
        self,
        qkv: Projections,
        keys: mx.array,
        values: mx.array,
        offset: int,
        spec: AttentionSpec,
        first: int = 0,
        phase: Phase = "prefill",
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Apply head norms and rotation, append K/V to the buffers, and attend causally over their entries.

        Returns (out (B, T, H * D), keys, values) with the rows [offset, offset + T) written. Use only the returned
        buffers afterwards: the given ones may have been written to.

        qkv: projections of T tokens of B sequences.
        keys, values: buffers (B, Hkv, capacity, D). A layer that reads an earlier one's K/V finds its rows written.
        offset: position of the first new token; the buffers have the rows of [first, offset), and room for T more.
        spec: of the layer.
        first: position of the buffers' first row; positions before it must be invisible.
        phase: of the tokens, see `runtime.ops.passes`.
        """
        ...

    def rotate_heads(self, x: mx.array, rope: Rope, offset: int) -> mx.array:
        """Rotate heads (B, heads, T, D) at positions [offset, offset + T)."""
        ...

    def attend_heads(
        self,
        q: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: mx.array | str | None,
        sinks: mx.array | None = None,
        phase: Phase | None = None,
        /,
    ) -> mx.array:
        """Attend with queries (B, H, T, D) over K/V (B, Hkv, S, D), rotated already -> (B, H, T, D).

        The queries are the last T of S positions.

        scale: factor of the scores.
        mask: of `mx.fast.scaled_dot_product_attention`.
        sinks: (H,), a logit of each head that takes part in its softmax and has no value.
        phase: None: a decode step if T = 1.
        """
        ...

    # -- attention over blocks of a pool

    def pages(self, spec: AttentionSpec) -> bool:
        """Return whether `attend_pass` reads the blocks of such a layer in place."""
        ...

    def slots(self, spec: AttentionSpec) -> bool:
        """Return whether one operation attends for several sequences in shared buffers (`runtime.ops.slots`)."""
        ...

    def slab(self, blocks: int, block_shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
        """Return an array for so many K/V blocks, (blocks, *block_shape), allocated now."""
        ...

    def cut_block(self, store: KVStore, group: int, block: mx.array, entries: int, /) -> mx.array:
        """Return a group's packed block (L, Hkv, bytes) with zeros after its first `entries`. L = layers of a group."""
        ...

    def write_block(self, store: KVStore, group: int, block: int, entries: mx.array) -> None:
        """Write entries (L, 2, Hkv, n, D) to the start of a block, now. No in-flight pass may use the block."""
        ...

    def attend_pass(self, qkv: Projections, rows: Pass, layer: int, spec: AttentionSpec) -> mx.array:
        """Attend for the rows of a pass, each over its sequence's entries up to its own -> (1, N, H * D).

        N = rows. New entries go to the store's slabs. Raises ValueError if a table is too short, lacks a visible block
        or has an unknown block.

        qkv: projections of (1, N) tokens.
        layer: its index in the network.
        """
        ...

    # -- recurrent layers, token selection, whole layers

    def mix_pass(
        self, x: mx.array, states: Sequence[mx.array], counts: Sequence[int], spec: MixerSpec
    ) -> tuple[mx.array, list[mx.array]]:
        """Mix the tokens of several sequences -> (y (1, N, Hv * Dv), the new states). Rows, states: `MixerSizes`.

        x: (1, N, projected), sequence after sequence.
        states: of each sequence, flat.
        counts: rows of each sequence.
        """
        ...

    def greedy(self, logits: mx.array) -> mx.array:
        """Return the token of the largest logit. (B, V) -> (B,) uint32."""
        ...

    def sample(self, logits: mx.array, rules: Sequence[SampleRule], keys: Sequence[int]) -> mx.array:
        """Choose a token for each row by its own rule. (B, V) -> (B,) uint32. keys: 64 random bits for each row."""
        ...

    def fuse(
        self,
        layers: Sequence[LayerWeights],
        eps: float,
        activation: str,
        /,
        *,
        rounding: int = 16,
        peer: "kernels.Peer | None" = None,
    ) -> LayersNode | None:
        """Return successive layers as one node; None if one of them is not supported.

        eps: of all norms.
        activation: of all feed-forwards.
        rounding: bits of the rounded activations of a prompt's rows, 16 or 8. Those of decode rows, mixers and experts
            have 16.
        peer: the rank that has the other part of each layer; None: this one has all.
        """
        ...


def select() -> Ops:
    """Return the fastest operations for MLX's default device. Raises UsageError for kernels that are not here."""
    wanted = environment.kernels()
    if wanted == "reference" or mx.default_device().type != mx.DeviceType.cpu:
        return reference
    if wanted and native.status().instruction_set != wanted:
        usable = ", ".join(native.instruction_sets()) or "none"
        raise UsageError(
            f"HEADRACE_KERNELS={wanted}: not compiled here, or not for this processor",
            f"unset HEADRACE_KERNELS, or set one that runs here ({usable}) or `reference`",
        )
    return native if native.status().available else reference


def describe() -> dict[str, str]:
    """Return the active kernels and the reason, for `headrace doctor` and benchmark headers.

    "metal": stock MLX operations, and headrace's Metal kernels in place of some (`runtime.ops.metal`).
    """
    ops = select()
    if ops is native:
        status = native.status()
        precision = "float32 throughout" if native.exact() else "activations in 16 bits"
        reason = f"built for this machine: {status.instruction_set}, {status.threads} threads, {precision}"
    elif environment.reference_kernels():
        reason = "HEADRACE_KERNELS=reference"
    elif mx.default_device().type == mx.DeviceType.cpu:
        reason = native.status().reason or "the native kernels are not available"
    else:
        reason = "stock MLX operations on the GPU"
        if mx.metal.is_available():
            metal_status = metal.status()  # not in `select`: it makes MLX's device
            if metal_status.available:
                return {"kernels": "metal", "reason": "Metal kernels, and stock MLX operations"}
            reason += f"; no Metal kernels: {metal_status.reason}"
    return {"kernels": ops.name, "reason": reason}
