"""Operations of a decoder layer on headrace's CPU kernels (sources: runtime/native; design: docs/kernels.md).

`Ops` has shapes and units. Activations are float32. Unsupported calls (another dtype, an unprepared weight, a head size
that is no multiple of 16) run on the reference; `status()` counts them by reason.

`native_plans` converts parameters into the kernels' form, once each. The C++ functions are declared in
runtime/_native.pyi. Guards: tests/runtime/ops/test_native_kernels.py compares with the reference;
test_native_row_bits.py: any row has the same bits in every batch; tests/models/network/test_routers.py: exact routers.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import mlx.core as mx
from msgspec import Struct, field
from msgspec.structs import force_setattr

from headrace.runtime.config import environment
from headrace.runtime.ops import mixtures, recurrent, reference
from headrace.runtime.ops.activations import ACTIVATIONS, STOCK_ONLY, Curve, GatedCurve, Xielu, unit
from headrace.runtime.ops.kv_format import FLOAT16, KVFormat, plain
from headrace.runtime.ops.layer_weights import LayersNode, LayerWeights
from headrace.runtime.ops.mixers import MixerSpec
from headrace.runtime.ops.native_plans import (
    HEAD_STEP,
    PreparedWeight,
    attention_plan,
    experts_plan,
    fallbacks,
    kernels,
    layer_plan,
    matrix_of,
    missing,
    mixer_plan,
    native_pass,
    native_rope,
    packings,
    prepared_matrix,
)
from headrace.runtime.ops.passes import KVStore, Pass, Phase
from headrace.runtime.ops.weights import AttentionSpec, LowRank, Mixture, Projections, Rope, SampleRule, Weight

name = "native"
_LEAST_STEP = 1e-30  # of bounded decays: its logarithm is finite
_NONE = mx.zeros((0,))  # data of a weight that is read later
_waiting: "ContextVar[list[PreparedWeight] | None]" = ContextVar("waiting", default=None)


# -- the library: availability, threads, figures -------------------------------------------------------------------


class NativeStatus(Struct, frozen=True):
    """Availability of the kernels. `fallbacks` counts reference calls by reason."""

    available: bool
    reason: str | None = None  # if not available
    instruction_set: str | None = None
    threads: int | None = None
    fallbacks: dict[str, int] = field(default_factory=dict)


def status() -> NativeStatus:
    """Return availability, instruction set, threads and fallbacks."""
    if missing is not None:
        return NativeStatus(False, missing)
    return NativeStatus(
        True,
        instruction_set=kernels.instruction_set(),
        threads=kernels.threads(),
        fallbacks=dict(fallbacks),
    )


def set_threads(threads: int) -> None:
    """Set the number of kernel threads; 0 means one per physical core. HEADRACE_THREADS sets it at import."""
    kernels.set_threads(threads)


def use_instruction_set(name: str) -> bool:
    """Use "avx512", "avx2", "neon", "portable", "amx" or "amx-emulated"; return False if this processor cannot."""
    return kernels.use_instruction_set(name)


def instruction_sets() -> list[str]:
    """Return the names of `use_instruction_set` that were compiled and that this processor can run.

    "amx-emulated", which is for tests, is not among them.
    """
    if missing is not None:
        return []
    before = kernels.instruction_set()
    usable = [name for name in environment.INSTRUCTION_SETS if kernels.use_instruction_set(name)]
    kernels.use_instruction_set(before)
    return usable


def free_unused() -> None:
    """Free the memory of weights that are gone, which arrays shared in large pieces."""
    if missing is None:
        kernels.free_unused_slabs()


def measure_regions(on: bool) -> None:
    """Start or stop measuring parallel regions; starting resets the figures."""
    kernels.measure_regions(on)


class RegionTimes(Struct, frozen=True):
    """Parallel regions of one kind of work since the measurement began, in the order of `kernels.region_times`.

    regions: their number.
    wall_ns: time of all of them.
    waiting_ns: the part in which the calling thread waited for others.
    busy_ns: sum of the times that the other threads worked.
    """

    regions: int
    wall_ns: int
    waiting_ns: int
    busy_ns: int


def region_times() -> dict[str, RegionTimes]:
    """Return the times by kind of work: "weights", "attention" and "sampling"."""
    return {kind: RegionTimes(*times) for kind, times in kernels.region_times().items()}


def streaming_read(size: int, threads: int, streams: int) -> "kernels.StreamingRead":
    """Return `size` bytes of memory to be read by `threads` threads in 1, 2, 4 or 8 `streams` each."""
    return kernels.StreamingRead(size, threads, streams)


def exact() -> bool:
    """Return whether HEADRACE_EXACT asks for float32 throughout."""
    return environment.exact()


# -- before use: weights and K/V formats ---------------------------------------------------------------------------


def prepare(weight: Weight, dtype: mx.Dtype, *, exact: bool = False) -> Weight:
    """Convert the weight to the kernels' layout, in its stored types.

    Activations multiplied by 2-, 4-, 5-, 6- and 8-bit weights are rounded to 16-bit groups with a scale, unless
    `exact`, or HEADRACE_EXACT for all.
    """
    matrix = None
    waiting = _waiting.get()
    # The kernels take float32 activations only; stock MLX multiplies others.
    if dtype == mx.float32:
        try:
            scales = _flat(weight.scales)
            biases = _flat(weight.biases)
            bias = weight.bias
            if bias is not None:
                bias = bias.reshape(-1)
            data = weight.data
            if data.ndim != 2:  # a stack; a matrix stays as it is, so that the parts of a joined one are seen
                data = data.reshape(weight.rows, -1)
            mode = weight.mode
            in_float = exact or environment.exact()
            matrix = kernels.Matrix(
                data, scales, biases, bias, weight.bits, weight.group_size, mode, in_float, later=waiting is not None
            )
        except ValueError as error:
            fallbacks[f"weight: {error}"] += 1
    shape = (weight.rows, weight.columns)
    bits = weight.bits
    group = weight.group_size
    if matrix is None:
        stock = reference.prepare(weight, dtype)  # its bits and groups may be others
        return PreparedWeight(
            stock.data, stock.scales, stock.biases, stock.bits, stock.group_size, stock.bias, weight.mode, None, shape
        )
    if waiting is not None:
        later = PreparedWeight(_NONE, None, None, bits, group, None, weight.mode, matrix, shape)
        waiting.append(later)
        return later
    # The kernels' copies of the arrays, so that those of the file can be freed.
    return PreparedWeight(
        matrix.data, matrix.scales, matrix.biases, bits, group, matrix.bias, weight.mode, matrix, shape
    )


def add_low_rank(weight: Weight, products: Sequence[LowRank]) -> list[mx.array] | None:
    """See `Ops`. None for a weight without a matrix."""
    matrix = matrix_of(weight)
    if matrix is None:
        return None
    a = mx.concatenate([product.a for product in products])
    scales = mx.concatenate([mx.full((product.a.shape[0],), product.scale) for product in products])
    matrix.add_low_rank(a, scales, [(product.row, product.b) for product in products])
    return matrix.low_rank_arrays


def unpack_blocks(kind: str, blocks: Any, codes: Any, scales: Any = None, biases: Any = None) -> tuple[bool, bool]:
    """Unpack GGUF blocks of a type to affine groups, without the interpreter lock; fill the arrays, of numpy or others.

    codes: bytes, a bit stream.
    scales, biases: of each group, both in float16 or in float32; None where only the codes are wanted.

    Returns whether all scales and biases are finite, and whether their type has them exactly.
    """
    return kernels.unpack_blocks(kind, blocks, codes, scales, biases)


@contextmanager
def read_together() -> Iterator[None]:
    """Read the weights that are prepared in this block at its end, without the interpreter lock.

    Until then they have sizes alone.
    """
    waiting: list[PreparedWeight] = []
    token = _waiting.set(waiting)
    try:
        yield
    finally:
        _waiting.reset(token)
    matrices = [weight.matrix for weight in waiting if weight.matrix is not None]
    while matrices:  # `fill` returns after 0.1 s, with the number that it has read: Ctrl-C is seen in between
        del matrices[: kernels.fill(matrices)]
    for weight in waiting:
        for name in ("data", "scales", "biases", "bias"):
            force_setattr(weight, name, getattr(weight.matrix, name))


def _flat(stack: mx.array | None) -> mx.array | None:
    """Return a stack (X, N, C) as one matrix (X * N, C)."""
    if stack is None or stack.ndim == 2:
        return stack
    return stack.reshape(-1, stack.shape[-1])


def kv_format(compute: mx.Dtype) -> KVFormat:
    """Return float16 unless `exact`: the kernels convert while reading, and memory bounds a step."""
    if compute == mx.float32 and not exact():
        return FLOAT16
    return plain(compute)


def supports_packed(head_dim: int) -> bool:
    return head_dim % HEAD_STEP == 0


def packed_format(kv: KVFormat, _head_dim: int) -> KVFormat:
    """Return the format itself, the kernels' layout."""
    return kv


def grow(buffer: mx.array, capacity: int) -> mx.array:
    """Copy the buffer now, with rows aligned to cache lines."""
    return kernels.grow(buffer, capacity)


# -- rows of tokens: products, norms, activations, experts ---------------------------------------------------------


def embed(tokens: mx.array, table: Weight, dtype: mx.Dtype, first: int | None = None) -> mx.array:
    """See `Ops`. Without `first` rows outside the table are NaN."""
    matrix = matrix_of(table)
    if matrix is None:
        return reference.embed(tokens, table, dtype, first)
    return kernels.embed(tokens, matrix, first)


def linear(x: mx.array, w: Weight) -> mx.array:
    matrix = prepared_matrix(x, w)
    if matrix is None:
        return reference.linear(x, w)
    return kernels.linear(x, matrix)


def linear_add(x: mx.array, w: Weight, residual: mx.array) -> mx.array:
    matrix = prepared_matrix(x, w)
    if matrix is None:
        return reference.linear_add(x, w, residual)
    return kernels.linear(x, matrix, residual=residual)


def linear_add_norm(
    x: mx.array,
    w: Weight,
    residual: mx.array,
    post_norm: mx.array | None,
    _norm: mx.array | None,
    eps: float,
    scalar: mx.array | None = None,
) -> tuple[mx.array, None]:
    """Return the sum alone: the norm before a projection is part of that projection's node."""
    if post_norm is not None:
        return add_norms(linear(x, w), residual, post_norm, None, eps, scalar)
    total = linear_add(x, w, residual)
    if scalar is not None:
        total = total * scalar
    return total, None


def add_norms(
    x: mx.array, residual: mx.array, post_norm: mx.array | None, _norm: Any, eps: float, scalar: mx.array | None = None
) -> tuple[mx.array, None]:
    """Return the sum alone, as `linear_add_norm`."""
    if post_norm is not None:
        x = rms_norm(x, post_norm, eps)
    total = residual + x
    if scalar is not None:
        total = total * scalar
    return total, None


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    if x.dtype != mx.float32:
        return reference.rms_norm(x, weight, eps)
    return kernels.rms_norm(x, weight, eps)


def layer_norm(x: mx.array, weight: mx.array, bias: mx.array | None, eps: float) -> mx.array:
    if x.dtype != mx.float32:
        return reference.layer_norm(x, weight, bias, eps)
    return kernels.layer_norm(x, weight, bias, eps)


def norm_linear(x: mx.array, norm: mx.array | None, eps: float, w: Weight) -> mx.array:
    """See `Ops`. Norm and projection are one node."""
    matrix = prepared_matrix(x, w)
    if matrix is None:
        return reference.norm_linear(x, norm, eps, w)
    return kernels.linear(x, matrix, norm, eps)


def glu(gate: mx.array, up: mx.array, activation: str | GatedCurve) -> mx.array:
    if isinstance(activation, GatedCurve) or activation in STOCK_ONLY or activation not in ACTIVATIONS:
        return reference.glu(gate, up, activation)  # KeyError for one without a gate, such as "relu2"
    if gate.shape != up.shape or not _floats(gate, up):
        return reference.glu(gate, up, activation)
    return kernels.gated(gate, up, activation)


def activate(x: mx.array, activation: str) -> mx.array:
    if not _floats(x) or activation not in ACTIVATIONS:
        return reference.activate(x, activation)
    return kernels.gated(x, None, activation)


def _floats(*arrays: mx.array | None) -> bool:
    """Return whether all arrays are float32."""
    return all(array is None or array.dtype == mx.float32 for array in arrays)


def norm_glu(x: mx.array, norm: mx.array | None, eps: float, w: Weight, activation: str | Curve) -> mx.array:
    """See `Ops`. One node, but for activations that the kernels lack."""
    matrix = prepared_matrix(x, w)
    if matrix is None:
        return reference.norm_glu(x, norm, eps, w, activation)
    if isinstance(activation, Xielu):
        return kernels.linear(x, matrix, norm, eps, None, "xielu", curve=activation)
    if activation == "tanh_gelu":
        return kernels.gated(kernels.linear(x, matrix, norm, eps), None, "gelu")
    if isinstance(activation, GatedCurve) or activation in STOCK_ONLY:
        return unit(kernels.linear(x, matrix, norm, eps), activation, compiled=False)
    return kernels.linear(x, matrix, norm, eps, None, activation)


def experts(
    x: mx.array,
    norm: mx.array,
    eps: float,
    m: Mixture,
    activation: str,
    normed: mx.array | None = None,
    entered: mx.array | None = None,
) -> mx.array:
    """See `Ops`. One node, unless the mixture is composed of parts."""
    if m.is_composed or activation in STOCK_ONLY:
        if normed is None:
            normed = rms_norm(x, norm, eps)
        ops = mixtures.PartOps(linear, expert_linear, rms_norm)
        return mixtures.experts_in_parts(x, normed, eps, m, activation, ops, entered)
    plan = experts_plan(m, activation)
    if plan is None:
        fallbacks["experts: weights were not prepared"] += 1
        return reference.experts(x, norm, eps, m, activation, normed)
    return kernels.experts(x, norm, eps, plan)


def join_experts(gate: Weight, up: Weight) -> tuple[Weight, Weight | None]:
    """Return the stacks as they are: one node reads both."""
    return gate, up


def expert_linear(x: mx.array, indices: mx.array, stack: Weight, experts: int) -> mx.array:
    matrix = prepared_matrix(x, stack)
    if matrix is None:
        return reference.expert_linear(x, indices, stack, experts)
    return kernels.expert_linear(mx.contiguous(x), indices, matrix, experts)


# -- attention, K/V blocks, recurrent layers -----------------------------------------------------------------------


def attend(
    qkv: Projections,
    keys: mx.array,
    values: mx.array,
    offset: int,
    spec: AttentionSpec,
    first: int = 0,
    phase: Phase = "prefill",
) -> tuple[mx.array, mx.array, mx.array]:
    """See `Ops`. One node. Evaluation writes the buffers in place, so nothing else may use them."""
    plan = _attention(qkv, spec)
    if plan is None:
        return reference.attend(qkv, keys, values, offset, spec, first)
    joined = mx.concatenate(qkv, axis=-1)
    return kernels.attend(joined, keys, values, offset, plan, first, phase == "prefill"), keys, values


def rotate_heads(x: mx.array, rope: Rope, offset: int) -> mx.array:
    if not _floats(x) or x.ndim != 4:
        return reference.rotate_heads(x, rope, offset)
    return kernels.rotate_heads(x, native_rope(rope), offset)


def attend_heads(
    q: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None = None,
    phase: Phase | None = None,
) -> mx.array:
    """See `Ops`. K/V are read in place.

    Masks other than causal ones run in prefill, where they are the same for all heads and not added to scores.
    """
    batch, _, length, dim = q.shape
    if phase is None:
        phase = "decode" if length == 1 else "prefill"
    fits = dim % HEAD_STEP == 0 and keys.shape == values.shape
    supported = fits and q.dtype == mx.float32 and keys.dtype == values.dtype
    visible = None
    if isinstance(mask, mx.array):
        phase = "prefill"
        visible = mask[None, None] if mask.ndim == 2 else mask
        supported = supported and mask.dtype == mx.bool_ and visible.ndim == 4 and visible.shape[1] == 1
        if supported:
            visible = mx.broadcast_to(visible, (batch, 1, length, keys.shape[2]))
    if not supported or (mask is None and length > 1):
        fallbacks[f"attention: head sizes {dim} and {values.shape[-1]}, {q.dtype}, mask {type(mask).__name__}"] += 1
        return reference.attend_heads(q, keys, values, scale, mask, sinks)
    out = kernels.attend_heads(q, keys, values, scale, phase == "prefill", visible, sinks)  # (B, T, H, D)
    return out.transpose(0, 2, 1, 3)


def mix_pass(
    x: mx.array, states: Sequence[mx.array], counts: Sequence[int], spec: MixerSpec
) -> tuple[mx.array, list[mx.array]]:
    if spec.bound:
        before, a = mx.split(x, [x.shape[-1] - spec.sizes.decays], axis=-1)
        steps = mx.maximum(recurrent.bounded_steps(a, spec), _LEAST_STEP)
        # The inverse of softplus, which the kernel takes of a.
        x = mx.concatenate([before, steps + mx.log(-mx.expm1(-steps))], axis=-1)
    return kernels.mix_pass(x, list(states), list(counts), mixer_plan(spec))


def pages(spec: AttentionSpec) -> bool:
    return spec.chosen is None and attention_plan(spec) is not None


def slots(_spec: AttentionSpec) -> bool:
    """Return False: the kernels write buffers in place, so sequences cannot share them."""
    return False


def slab(blocks: int, block_shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    """Align rows to cache lines."""
    return kernels.slab([blocks, *block_shape], dtype)


def cut_block(store: KVStore, group: int, block: mx.array, entries: int) -> mx.array:
    return kernels.cut_block(block, entries, packings(store.format), store.groups[group].kind.head_dim)


def write_block(store: KVStore, group: int, block: int, entries: mx.array) -> None:
    """See `Ops`. Packed blocks are written whole."""
    number, index = store.groups[group].find(block)
    kernels.write_block(store.groups[group].slabs[number], index, entries)


def attend_pass(qkv: Projections, rows: Pass, layer: int, spec: AttentionSpec) -> mx.array:
    """See `Ops`. One node. Evaluation writes the slabs in place, so later readers must depend on it."""
    plan = _attention(qkv, spec)
    if plan is None:
        return reference.attend_pass(qkv, rows, layer, spec)
    # No token of the pass is chosen, as in most chunks of a prompt: the last layer appends K/V only.
    appends_only = rows.wanted == 0 and layer + 1 == len(rows.store.locations)  # its result is not used
    group, index = rows.store.locations[layer]
    return kernels.attend_pass(mx.concatenate(qkv, axis=-1), native_pass(rows), group, index, plan, appends_only)


def _attention(qkv: Projections, spec: AttentionSpec) -> "kernels.AttentionPlan | None":
    """Return the plan of attention; None, counted as a fallback, if the reference attends."""
    plan = attention_plan(spec)
    if plan is None:
        fallbacks[f"attention: head size {spec.head_dim}"] += 1
        return None
    if qkv[0].dtype != mx.float32:
        fallbacks[f"attention: {qkv[0].dtype}"] += 1
        return None
    return plan


# -- token selection, and whole layers -----------------------------------------------------------------------------


def greedy(logits: mx.array) -> mx.array:
    if logits.dtype != mx.float32:
        return reference.greedy(logits)
    return kernels.sample(logits, (), ())


def sample(logits: mx.array, rules: Sequence[SampleRule], keys: Sequence[int]) -> mx.array:
    return kernels.sample(logits.astype(mx.float32), rules, keys)


def fuse(
    layers: Sequence[LayerWeights],
    eps: float,
    activation: str,
    *,
    rounding: int = 16,
    peer: "kernels.Peer | None" = None,
) -> LayersNode | None:
    """See `Ops`. A single node saves the graph's overhead."""
    plans = []
    for layer in layers:
        plan = layer_plan(layer, eps, activation)
        if plan is None:
            return None
        plans.append(plan)
    return _Fused(plans, rounding, peer)


class _Fused:
    """Layers as one node of the kernels. See `LayersNode`."""

    def __init__(self, plans: "list[kernels.LayerPlan]", rounding: int, peer: "kernels.Peer | None") -> None:
        self._plans = plans
        self._peer = peer
        self._rounding = rounding  # bits of a prompt's rows

    def __call__(
        self,
        x: mx.array,
        keys: list[mx.array],
        values: list[mx.array],
        offset: int,
        firsts: Sequence[int],
        phase: Phase,
        wanted: int,
    ) -> mx.array:
        if not any(firsts):
            firsts = ()
        prefill = phase == "prefill"
        return kernels.layers(x, keys, values, offset, self._plans, firsts, prefill, self._rounding, wanted, self._peer)

    def run_pass(
        self, x: mx.array, rows: Pass, layers: slice, states: Sequence[Sequence[mx.array]], kept_rows: int, wanted: int
    ) -> list[mx.array]:
        return kernels.layers_pass(
            x,
            native_pass(rows),
            rows.store.locations[layers],
            self._plans,
            states,
            kept_rows,
            self._rounding,
            wanted,
            self._peer,
        )


if missing is None and (_wanted := environment.threads()):
    set_threads(_wanted)
if missing is None and environment.kernels() in environment.INSTRUCTION_SETS:
    use_instruction_set(environment.kernels())  # `runtime.ops.select` refuses one that is not there
