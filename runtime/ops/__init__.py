"""Operations of a decoder layer, with two implementations: stock MLX (`reference`) and CPU kernels (`native`).

Networks call an `Ops`. `reference` runs everywhere; `native` runs headrace's CPU kernels as nodes of MLX's graph, if
they were built. `select` chooses at load; HEADRACE_KERNELS=reference forces stock MLX, HEADRACE_KERNELS=avx2
and the like one of the compiled instruction sets.

Both are modules, so a new operation is a function of the same name in `reference.py` and `native.py`, and a line in
`Ops`; mypy compares the signatures in `select`. `reference` defines each result, and
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
    """Operations of a decoder layer. Signatures and shapes: see `runtime.ops.reference`.

    Before use: prepare, add_low_rank, kv_format, supports_packed, packed_format, join_experts, fuse.
    Rows of tokens: embed, linear, norms, glu, activate, experts, rotate_heads, attend_heads.
    A sequence's own buffers: grow, attend, slots. Blocks of a pool: pages, slab, cut_block, write_block, attend_pass.
    Recurrent layers: mix_pass. Token selection: greedy, sample.
    """

    @property
    def name(self) -> str: ...

    def prepare(self, weight: Weight, dtype: mx.Dtype, *, exact: bool = False) -> Weight: ...
    def add_low_rank(self, weight: Weight, products: Sequence[LowRank]) -> list[mx.array] | None: ...
    def kv_format(self, compute: mx.Dtype) -> KVFormat: ...
    def supports_packed(self, head_dim: int) -> bool: ...
    def packed_format(self, kv: KVFormat, head_dim: int, /) -> KVFormat: ...
    def embed(self, tokens: mx.array, table: Weight, dtype: mx.Dtype, first: int | None = None) -> mx.array: ...
    def linear(self, x: mx.array, w: Weight) -> mx.array: ...
    def linear_add(self, x: mx.array, w: Weight, residual: mx.array) -> mx.array: ...
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
    ) -> tuple[mx.array, mx.array | None]: ...
    def add_norms(
        self,
        x: mx.array,
        residual: mx.array,
        post_norm: mx.array | None,
        norm: mx.array | None,
        eps: float,
        scalar: mx.array | None = None,
        /,
    ) -> tuple[mx.array, mx.array | None]: ...
    def rms_norm(self, x: mx.array, weight: mx.array, eps: float) -> mx.array: ...
    def layer_norm(self, x: mx.array, weight: mx.array, bias: mx.array | None, eps: float) -> mx.array: ...
    def norm_linear(self, x: mx.array, norm: mx.array | None, eps: float, w: Weight) -> mx.array: ...
    def glu(self, gate: mx.array, up: mx.array, activation: str | GatedCurve) -> mx.array: ...
    def activate(self, x: mx.array, activation: str) -> mx.array: ...
    def norm_glu(
        self, x: mx.array, norm: mx.array | None, eps: float, w: Weight, activation: str | Curve
    ) -> mx.array: ...
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
    ) -> mx.array: ...
    def expert_linear(self, x: mx.array, indices: mx.array, stack: Weight, experts: int, /) -> mx.array: ...
    def join_experts(self, gate: Weight, up: Weight) -> tuple[Weight, Weight | None]: ...
    def grow(self, buffer: mx.array, capacity: int) -> mx.array: ...
    def attend(
        self,
        qkv: Projections,
        keys: mx.array,
        values: mx.array,
        offset: int,
        spec: AttentionSpec,
        first: int = 0,
        phase: Phase = "prefill",
    ) -> tuple[mx.array, mx.array, mx.array]: ...
    def rotate_heads(self, x: mx.array, rope: Rope, offset: int) -> mx.array: ...
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
    ) -> mx.array: ...
    def pages(self, spec: AttentionSpec) -> bool: ...
    def slots(self, spec: AttentionSpec) -> bool: ...
    def slab(self, blocks: int, block_shape: Sequence[int], dtype: mx.Dtype) -> mx.array: ...
    def cut_block(self, store: KVStore, group: int, block: mx.array, entries: int, /) -> mx.array: ...
    def write_block(self, store: KVStore, group: int, block: int, entries: mx.array) -> None: ...
    def attend_pass(self, qkv: Projections, rows: Pass, layer: int, spec: AttentionSpec) -> mx.array: ...
    def mix_pass(
        self, x: mx.array, states: Sequence[mx.array], counts: Sequence[int], spec: MixerSpec
    ) -> tuple[mx.array, list[mx.array]]: ...
    def greedy(self, logits: mx.array) -> mx.array: ...
    def sample(self, logits: mx.array, rules: Sequence[SampleRule], keys: Sequence[int]) -> mx.array: ...
    def fuse(
        self,
        layers: Sequence[LayerWeights],
        eps: float,
        activation: str,
        /,
        *,
        rounding: int = 16,
        peer: "kernels.Peer | None" = None,
    ) -> LayersNode | None: ...


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
