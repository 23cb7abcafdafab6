"""The operations of a decoder layer on headrace's own CPU kernels (sources: runtime/native, account: docs/kernels.md).

Same signatures and shapes as `runtime.ops.reference`. Activations are float32. What the kernels do not know
(another dtype, a weight that `prepare` could not take, a head size that is no multiple of 16) runs on the reference;
`status()` counts those calls by reason.
"""

import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import mlx.core as mx

from headrace.runtime.config import environment
from headrace.runtime.ops import reference
from headrace.runtime.ops.kv_format import FLOAT16, KVFormat, plain
from headrace.runtime.ops.passes import KVStore, Pass, Phase
from headrace.runtime.ops.weights import (
    AttentionSpec,
    LayersNode,
    LayerWeights,
    Mixture,
    Projections,
    Rope,
    SampleRule,
    Weight,
)

_missing: str | None = None
if TYPE_CHECKING:
    from headrace.runtime import _native
else:
    try:
        import headrace.runtime._native as _native
    except ModuleNotFoundError:
        _native, _missing = None, "not built here: installing them needs Linux and a C++20 compiler"
    except ImportError as error:  # built against another mlx, say
        _native, _missing = None, f"built, but they do not load: {error}"

name = "native"

_fallbacks: Counter[str] = Counter()
_plans: "dict[int, _native.AttentionPlan | None]" = {}  # by id(spec); None where the kernels cannot take it
_mixtures: "dict[int, _native.ExpertsPlan | None]" = {}  # by id(mixture); None where the kernels do not hold it
_packed: "dict[KVFormat, _native.Packings]" = {}
_ropes: "dict[int, _native.Rope]" = {}  # by id(rope), shared by layers that rotate alike


@dataclass(frozen=True, slots=True)
class Status:
    """What runs here, or why not. `fallbacks` counts reference calls by reason."""

    available: bool
    reason: str | None = None  # why not
    instruction_set: str | None = None
    threads: int | None = None
    fallbacks: dict[str, int] = field(default_factory=dict)


def status() -> Status:
    """Whether the kernels were built and load here, what they run on, and what had to fall back."""
    if _missing is not None:
        return Status(False, _missing)
    return Status(
        True,
        instruction_set=_native.instruction_set(),
        threads=_native.threads(),
        fallbacks=dict(_fallbacks),
    )


def set_threads(threads: int) -> None:
    """How many threads the kernels use; 0 means one per physical core. HEADRACE_THREADS sets it at import."""
    _native.set_threads(threads)


def use_instruction_set(name: str) -> bool:
    """Compute with "avx512", "avx2", "neon" or "portable"; False where this processor cannot. For tests."""
    return _native.use_instruction_set(name)


def measure_regions(on: bool) -> None:
    """Begin or end to measure the parallel regions of the kernels; beginning forgets what was measured."""
    _native.measure_regions(on)


def region_times() -> dict[str, tuple[int, int, int, int]]:
    """Kind of work -> regions, nanoseconds in them, of those waiting for other threads, and what those worked."""
    return _native.region_times()


def streaming_read(size: int, threads: int, streams: int) -> "_native.StreamingRead":
    """`size` bytes of memory, to be read by `threads` threads, each at 1, 2, 4 or 8 places (`streams`) side by side."""
    return _native.StreamingRead(size, threads, streams)


@dataclass(frozen=True, slots=True, eq=False)
class PreparedWeight(Weight):
    """A weight whose arrays the kernels hold; `matrix` is None where they cannot.

    The arrays of 2-, 4- and 8-bit weights are in an order of the kernels' own (runtime/native/core/interleaved.h), so
    what has a matrix never goes to the reference: activations that are not float32 are a ValueError.
    """

    matrix: "_native.Matrix | None" = None
    shape: tuple[int, int] = (0, 0)  # (N, K), whatever shape the arrays have; of a stack, (X * N, K)

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def columns(self) -> int:
        return self.shape[1]


def exact() -> bool:
    """Whether HEADRACE_EXACT asks for float32 throughout, for comparisons with other implementations."""
    return environment.exact()


def prepare(weight: Weight, dtype: mx.Dtype) -> Weight:
    """Hand the weight to the kernels. It stays in its stored types: half precision is read as it is.

    What meets 2-, 4- and 8-bit weights is rounded to 16 bits (a group of values shares a scale), unless `exact`.
    """
    matrix = None
    if dtype == mx.float32:
        try:
            scales, biases = _flat(weight.scales), _flat(weight.biases)
            bias = None if weight.bias is None else weight.bias.reshape(-1)
            data = weight.data.reshape(weight.rows, -1)
            matrix = _native.Matrix(data, scales, biases, bias, weight.bits, weight.group_size, weight.mode, exact())
        except ValueError as error:
            _fallbacks[f"weight: {error}"] += 1
    # The kernels' own copies, so that the ones from the file can go.
    held = reference.prepare(weight, dtype) if matrix is None else matrix
    shape = (weight.rows, weight.columns)
    bits, group = (weight.bits, weight.group_size) if isinstance(held, _native.Matrix) else (held.bits, held.group_size)
    return PreparedWeight(held.data, held.scales, held.biases, bits, group, held.bias, weight.mode, matrix, shape)


def _flat(stack: mx.array | None) -> mx.array | None:
    """(X, N, C) -> (X * N, C): the kernels take a stack as one matrix."""
    return stack if stack is None or stack.ndim == 2 else stack.reshape(-1, stack.shape[-1])


def kv_format(compute: mx.Dtype) -> KVFormat:
    """Half precision unless `exact`: the kernels convert as they read, and a step is bound by the bytes it reads."""
    return FLOAT16 if compute == mx.float32 and not exact() else plain(compute)


def packs(head_dim: int) -> bool:
    """Whether attention reads packed formats of such heads."""
    return head_dim % 16 == 0


def packed_format(kv: KVFormat, _head_dim: int) -> KVFormat:
    """How a packed format is stored here: as it says itself."""
    return kv


def _packings(kv: KVFormat) -> "_native.Packings":
    """How a packed format is written and read; what is stored plainly has none."""
    if kv not in _packed:
        _packed[kv] = _native.Packings(kv.keys.bits, kv.keys.group, kv.values.bits, kv.values.group)
    return _packed[kv]


def grow(buffer: mx.array, capacity: int) -> mx.array:
    """A K/V buffer with room for `capacity` entries, copied now, to where each row begins on a cache line."""
    return _native.grow(buffer, capacity)


def embed(tokens: mx.array, table: Weight, dtype: mx.Dtype) -> mx.array:
    """Rows of the embedding table. tokens (B, T) -> (B, T, E); NaN for a token that the table does not have."""
    matrix = table.matrix if isinstance(table, PreparedWeight) else None
    return reference.embed(tokens, table, dtype) if matrix is None else _native.embed(tokens, matrix)


def linear(x: mx.array, w: Weight) -> mx.array:
    """x @ w.T (+ bias). x (B, T, K) -> (B, T, N)."""
    matrix = _matrix(x, w)
    return reference.linear(x, w) if matrix is None else _native.linear(x, matrix)


def linear_add(x: mx.array, w: Weight, residual: mx.array) -> mx.array:
    """residual + x @ w.T. (B, T, K) -> (B, T, N)."""
    matrix = _matrix(x, w)
    if matrix is None:
        return reference.linear_add(x, w, residual)
    return _native.linear(x, matrix, residual=residual)


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """Root mean square normalisation over the last axis."""
    if x.dtype != mx.float32:
        return reference.rms_norm(x, weight, eps)
    return _native.rms_norm(x, weight, eps)


def norm_linear(x: mx.array, norm: mx.array, eps: float, w: Weight) -> mx.array:
    """RMSNorm, then a projection, in one node. x (B, T, E) -> (B, T, N)."""
    matrix = _matrix(x, w)
    return reference.norm_linear(x, norm, eps, w) if matrix is None else _native.linear(x, matrix, norm, eps)


def glu(gate: mx.array, up: mx.array, activation: str) -> mx.array:
    """Gated linear unit of gate and up projections that could not be stacked. (B, T, F) each -> (B, T, F)."""
    return reference.glu(gate, up, activation)


def norm_glu(x: mx.array, norm: mx.array, eps: float, w: Weight, activation: str) -> mx.array:
    """RMSNorm, gate and up projections, act(gate) * up, in one node. x (B, T, E) -> (B, T, F)."""
    matrix = _matrix(x, w)
    if matrix is None:
        return reference.norm_glu(x, norm, eps, w, activation)
    return _native.linear(x, matrix, norm, eps, None, activation)


def experts(x: mx.array, norm: mx.array, eps: float, m: Mixture, activation: str) -> mx.array:
    """x + the shares of its experts' answers to norm(x), in one node that reads no others. (B, T, E) -> (B, T, E)."""
    plan = _experts_plan(m, activation)
    if plan is None:
        _fallbacks["experts: weights were not prepared"] += 1
        return reference.experts(x, norm, eps, m, activation)
    return _native.experts(x, norm, eps, plan)


def attend(
    qkv: Projections,
    keys: mx.array,
    values: mx.array,
    offset: int,
    spec: AttentionSpec,
    first: int = 0,
    phase: Phase = "prefill",
) -> tuple[mx.array, mx.array, mx.array]:
    """Head norms, rotation, cache write and attention in one node; see the reference for shapes.

    The buffers are written in place, when the node is evaluated: nobody else may hold them.
    """
    qkv, plan = _attention(qkv, spec)
    if plan is None:
        return reference.attend(qkv, keys, values, offset, spec, first)
    return _native.attend(qkv, keys, values, offset, plan, first, phase == "prefill"), keys, values


def pages(spec: AttentionSpec) -> bool:
    """Whether attention reads blocks where they are: the kernels do."""
    return _plan(spec) is not None


def slots(_spec: AttentionSpec) -> bool:
    """Whether stock operations may append to the buffers of several sequences: kernels write theirs in place."""
    return False


def slab(blocks: int, block_shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    """Room for K/V, (blocks, *block_shape), where each row begins on a cache line."""
    return _native.slab([blocks, *block_shape], dtype)


def cut_block(store: KVStore, block: mx.array, entries: int) -> mx.array:
    """A packed block (L, Hkv, bytes) without what lies behind its first entries: zeros are there instead."""
    return _native.cut_block(block, entries, _packings(store.format), store.head_dim)


def write_block(store: KVStore, group: int, block: int, entries: mx.array) -> None:
    """Entries (L, 2, Hkv, n, D) become a block's first n, at once, in place. No pass under way may have the block.

    A packed block is written whole.
    """
    number, index = store.groups[group].find(block)
    _native.write_block(store.groups[group].slabs[number], index, entries)


def attend_pass(qkv: Projections, rows: Pass, layer: int, spec: AttentionSpec) -> mx.array:
    """`attend` for the rows of a pass, over the blocks of their sequences, in one node; see the reference for shapes.

    Slabs are written in place, when the node is evaluated: what reads them next has to come after it.
    """
    qkv, plan = _attention(qkv, spec)
    if plan is None:
        return reference.attend_pass(qkv, rows, layer, spec)
    return _native.attend_pass(qkv, _held(rows), *rows.store.places[layer], plan)


def _attention(qkv: Projections, spec: AttentionSpec) -> "tuple[mx.array, _native.AttentionPlan | None]":
    """The projections in one array, and the kernels' plan; None, and counted, where stock MLX has to attend."""
    plan = _plan(spec)
    if not isinstance(qkv, mx.array):
        qkv = mx.concatenate(qkv, axis=-1)
    if plan is None or qkv.dtype != mx.float32:
        _fallbacks[f"attention: head size {spec.head_dim}" if plan is None else f"attention: {qkv.dtype}"] += 1
        return qkv, None
    return qkv, plan


def _held(rows: Pass) -> "_native.Pass":
    """The pass as the kernels have it, made once."""
    held: _native.Pass | None = rows.held
    if held is None:
        sequences = rows.sequences
        rows.held = held = _native.Pass(
            [sequence.count for sequence in sequences],
            [sequence.offset for sequence in sequences],
            [sequence.phase == "prefill" for sequence in sequences],
            [sequence.tables for sequence in sequences],
            [group.slabs for group in rows.store.groups],
            *((_packings(kv), rows.store.head_dim) if (kv := rows.store.format).packed else ()),
        )
    return held


def greedy(logits: mx.array) -> mx.array:
    """The token of the largest logit. (B, V) -> (B,) uint32."""
    if logits.dtype != mx.float32:
        return reference.greedy(logits)
    return _native.sample(logits, (), ())


def sample(logits: mx.array, rules: Sequence[SampleRule], keys: Sequence[int]) -> mx.array:
    """A token for each row by its own rule and 64 random bits, in one node. logits (B, V) float32 -> (B,) uint32."""
    return _native.sample(logits, rules, keys)


def fuse(layers: Sequence[LayerWeights], eps: float, activation: str) -> LayersNode | None:
    """The layers as one node: five a layer would cost a small model's step a millisecond.

    None where a layer has post norms, parts quantized differently, or anything the kernels could not take.
    """
    plans = [_layer_plan(layer, eps, activation) for layer in layers]
    complete = [plan for plan in plans if plan is not None]
    return None if len(complete) < len(plans) else _Fused(complete)


class _Fused:
    """Layers whose plans the kernels have. See `LayersNode`."""

    def __init__(self, plans: "list[_native.LayerPlan]") -> None:
        self._plans = plans

    def __call__(
        self,
        x: mx.array,
        keys: list[mx.array],
        values: list[mx.array],
        offset: int,
        firsts: Sequence[int],
        phase: Phase,
    ) -> mx.array:
        firsts = firsts if any(firsts) else ()
        return _native.layers(x, keys, values, offset, self._plans, firsts, phase == "prefill")

    def run_pass(self, x: mx.array, rows: Pass, layers: slice) -> mx.array:
        return _native.layers_pass(x, _held(rows), rows.store.places[layers], self._plans)


def _layer_plan(layer: LayerWeights, eps: float, activation: str) -> "_native.LayerPlan | None":
    weights = layer.matrices if layer.mixture is None else [*layer.qkv, layer.output]
    matrices = [weight.matrix for weight in weights if isinstance(weight, PreparedWeight)]
    experts = None if layer.mixture is None else _experts_plan(layer.mixture, activation)
    plan = _plan(layer.attention)
    if None in matrices or plan is None or layer.mlp_post_norm is not None:
        return None
    if len(matrices) != (4 if layer.mixture is None else 2) or (layer.mixture is not None and experts is None):
        return None
    qkv, output, gate_up, down = (*matrices, None, None)[:4]
    return _native.LayerPlan(
        plan, layer.input_norm, qkv, output, layer.mlp_norm, gate_up, down, eps, activation, experts
    )


def _experts_plan(m: Mixture, activation: str) -> "_native.ExpertsPlan | None":
    key = id(m)
    if key in _mixtures:
        return _mixtures[key]
    matrices = [w.matrix if isinstance(w, PreparedWeight) else None for w in (m.router, *m.stacks)]
    router, gate, up, down = matrices
    plan = None
    if router is not None and gate is not None and up is not None and down is not None:
        plan = _native.ExpertsPlan(router, gate, up, down, m.active, m.normalized, activation)
    elif any(matrices):
        raise ValueError("the kernels hold only part of a layer's experts: nothing else can read those")
    _mixtures[key] = plan
    weakref.finalize(m, _mixtures.pop, key, None)
    return plan


def _matrix(x: mx.array, w: Weight) -> "_native.Matrix | None":
    """What the kernels hold of a weight; None, counted, where this product has to run on the reference."""
    matrix = w.matrix if isinstance(w, PreparedWeight) else None
    if matrix is None:
        _fallbacks["linear: weight was not prepared" if x.dtype == mx.float32 else f"linear: {x.dtype}"] += 1
    return matrix


def _plan(spec: AttentionSpec) -> "_native.AttentionPlan | None":
    key = id(spec)
    if key in _plans:
        return _plans[key]
    plan = None
    if spec.head_dim % 16 == 0:
        plan = _native.AttentionPlan(
            spec.heads,
            spec.kv_heads,
            spec.head_dim,
            spec.scale,
            None if spec.rope is None else _rope(spec.rope),
            spec.q_norm,
            spec.k_norm,
            spec.norm_eps,
            spec.window,
            spec.softcap,
            spec.sinks,
        )
    _plans[key] = plan
    weakref.finalize(spec, _plans.pop, key, None)
    return plan


def _rope(rope: Rope) -> "_native.Rope":
    key = id(rope)
    if key not in _ropes:
        _ropes[key] = _native.make_rope(rope.periods, rope.amplitude)
        weakref.finalize(rope, _ropes.pop, key, None)
    return _ropes[key]


if _missing is None and (_wanted := environment.threads()):
    set_threads(_wanted)
