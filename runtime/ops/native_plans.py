"""Weights, layers and passes in the native kernels' form, each made once.

Plans are cached by the id of their specification and dropped with it.
"""

import weakref
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

from headrace.runtime.ops.activations import Xielu
from headrace.runtime.ops.kv_format import KVFormat
from headrace.runtime.ops.layer_weights import LayerWeights
from headrace.runtime.ops.mixers import MixerSpec
from headrace.runtime.ops.passes import Pass
from headrace.runtime.ops.weights import AttentionSpec, Mixture, Rope, Weight

__all__ = [
    "PreparedWeight",
    "attention_plan",
    "experts_plan",
    "fallbacks",
    "kernels",
    "layer_plan",
    "missing",
    "mixer_plan",
    "native_pass",
    "native_rope",
    "packings",
    "prepared_matrix",
]

missing: str | None = None  # the reason, if the kernels did not load
if TYPE_CHECKING:
    from headrace.runtime import _native as kernels
else:
    try:
        import headrace.runtime._native as kernels
    except ModuleNotFoundError:
        kernels = None
        missing = "not built: building them needs Linux, a C++20 compiler and Python's headers"
    except ImportError as error:  # such as a build against another mlx
        kernels = None
        missing = f"built, but cannot be loaded: {error}"


fallbacks: Counter[str] = Counter()  # reference calls by reason
_plans: "dict[int, kernels.AttentionPlan | None]" = {}  # by id(spec); None: not supported
_mixtures: "dict[int, kernels.ExpertsPlan | None]" = {}  # by id(mixture); None: not prepared
_mixers: "dict[int, kernels.MixerPlan]" = {}  # by id(spec)
_packed: "dict[KVFormat, kernels.Packings]" = {}
_ropes: "dict[int, kernels.Rope]" = {}  # by id(rope); shared by layers


@dataclass(frozen=True, slots=True, eq=False)
class PreparedWeight(Weight):
    """A weight in the kernels' layout; `matrix` is None if they do not support it.

    2-, 4- and 8-bit weights are interleaved (runtime/native/core/interleaved.h), so a weight with a matrix never goes
    to the reference: activations other than float32 raise ValueError.
    """

    matrix: "kernels.Matrix | None" = None
    shape: tuple[int, int] = (0, 0)  # (N, K); of a stack, (X * N, K)

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def columns(self) -> int:
        return self.shape[1]


def layer_plan(layer: LayerWeights, eps: float, activation: str) -> "kernels.LayerPlan | None":
    """Return the plan of a whole layer; None if it has split weights or unsupported parts."""
    feed_forward = [*layer.gate_up, *([] if layer.down is None else [layer.down])]
    weights = [*layer.qkv, layer.output, *feed_forward]
    end_matrices = [weight.matrix for weight in layer.mixer_ends or () if isinstance(weight, PreparedWeight)]
    matrices = [weight.matrix for weight in weights if isinstance(weight, PreparedWeight)]
    gates = [gate.matrix if isinstance(gate, PreparedWeight) else None for gate in (layer.gate, layer.down_gate)]
    experts = None if layer.mixture is None else experts_plan(layer.mixture, activation)
    if None in matrices or None in end_matrices or len(layer.qkv) != 1 or len(matrices) != (4 if feed_forward else 2):
        return None
    if layer.mlp_norm is None and layer.attention_post_norm is None and (feed_forward or layer.mixture is not None):
        return None
    if layer.latent is not None or layer.mixer_gates is not None:
        return None
    if layer.gate is not None and layer.gate.rows != layer.output.columns:  # a gate for each head
        return None
    if layer.mixture is not None and (layer.mlp_norm is None or layer.mixture.curve is not None):
        return None
    curve = layer.curve
    if curve is not None and not isinstance(curve, Xielu):
        return None
    if layer.mlp_post_norm is not None and layer.mixture is not None and layer.branches is None:
        return None
    if (layer.mixture is None) != (experts is None):
        return None
    if [gate is None for gate in gates] != [layer.gate is None, layer.down_gate is None]:
        return None
    plan = None if layer.attention is None else attention_plan(layer.attention)
    if layer.attention is not None and plan is None:
        return None
    own_input = _own_input(layer)
    if (layer.own_input is None) != (own_input is None):
        return None
    mixer = None if layer.mixer is None else mixer_plan(layer.mixer)
    qkv, output, gate_up, down = (*matrices, None, None)[:4]
    after_dense, before_experts, after_experts = layer.branches or (None, None, None)
    norms = kernels.LayerNorms(
        layer.input_norm,
        layer.attention_post_norm,
        layer.mlp_norm,
        layer.mlp_post_norm,
        after_dense,
        before_experts,
        after_experts,
        layer.scalar,
    )
    ends = (end_matrices[0], end_matrices[1]) if len(end_matrices) > 1 and end_matrices[0] and end_matrices[1] else None
    parts = (plan, qkv, output, gate_up, down, eps, "xielu" if curve else activation, experts, mixer)
    return kernels.LayerPlan(*parts, (gates[0], gates[1]), norms, own_input, ends, curve)


def _own_input(layer: LayerWeights) -> "tuple[kernels.Matrix, kernels.Matrix, mx.array] | None":
    """Return the weights of a layer's own input; None without one, or if they were not prepared."""
    if layer.own_input is None:
        return None
    gate, projection, norm = layer.own_input
    if not isinstance(gate, PreparedWeight) or not isinstance(projection, PreparedWeight):
        return None
    if gate.matrix is None or projection.matrix is None:
        return None
    return gate.matrix, projection.matrix, norm


def experts_plan(m: Mixture, activation: str) -> "kernels.ExpertsPlan | None":
    """Return the plan of a mixture of experts; None if its weights were not prepared."""
    key = id(m)
    if key in _mixtures:
        return _mixtures[key]
    matrices = [w.matrix if isinstance(w, PreparedWeight) else None for w in (m.router, m.gate, m.up, m.down)]
    router, gate, up, down = matrices
    plan = None
    gated = gate is not None or m.gate is None
    if router is not None and gated and up is not None and down is not None:
        rule = (m.sigmoid, m.correction, m.scale, m.groups, m.router_norm, m.expert_scale, m.residual)
        last = (m.best, m.shares_first)
        plan = kernels.ExpertsPlan(router, gate, up, down, m.active, m.normalized, activation, *rule, *last)
    elif any(matrices):
        raise ValueError("the native kernels support only some of a layer's expert weights")
    _mixtures[key] = plan
    weakref.finalize(m, _mixtures.pop, key, None)
    return plan


def prepared_matrix(x: mx.array, w: Weight) -> "kernels.Matrix | None":
    """Return the kernels' matrix of a weight; None, counted as a fallback, if the product runs on the reference."""
    matrix = w.matrix if isinstance(w, PreparedWeight) else None
    if matrix is None:
        fallbacks["linear: weight was not prepared" if x.dtype == mx.float32 else f"linear: {x.dtype}"] += 1
    return matrix


def attention_plan(spec: AttentionSpec) -> "kernels.AttentionPlan | None":
    """Return the plan of a layer's attention; None for unsupported head sizes."""
    key = id(spec)
    if key in _plans:
        return _plans[key]
    plan = None
    ones = mx.ones((spec.head_dim,)) if spec.unit_norms else None
    if spec.head_dim % 16 == 0:
        plan = kernels.AttentionPlan(
            spec.heads,
            spec.kv_heads,
            spec.head_dim,
            spec.scale,
            None if spec.rope is None else native_rope(spec.rope),
            ones if spec.q_norm is None else spec.q_norm,
            ones if spec.k_norm is None else spec.k_norm,
            spec.norm_eps,
            spec.window,
            spec.softcap,
            spec.sinks,
            spec.norm_last,
            spec.growth,
            spec.v_norm,
            len(spec.projects),
            spec.chunked,
        )
    _plans[key] = plan
    weakref.finalize(spec, _plans.pop, key, None)
    return plan


def mixer_plan(spec: MixerSpec) -> "kernels.MixerPlan":
    """Return the plan of a layer's recurrent mixing. Raises ValueError for shapes that do not fit."""
    key = id(spec)
    if key not in _mixers:
        sizes = (spec.sizes.kind, spec.sizes.heads, spec.sizes.key_heads, spec.sizes.key_dim, spec.sizes.value_dim)
        vectors = (spec.tap_bias, spec.rate, spec.step_bias, spec.skip, spec.norm)
        settings = (spec.norm_first, spec.norm_eps, spec.steps, spec.most_beta)
        _mixers[key] = kernels.MixerPlan(*sizes, spec.taps, *vectors, *settings)
        weakref.finalize(spec, _mixers.pop, key, None)
    return _mixers[key]


def native_rope(rope: Rope) -> "kernels.Rope":
    """Return the rotation in the kernels' form."""
    key = id(rope)
    if key not in _ropes:
        _ropes[key] = kernels.make_rope(rope.periods, rope.amplitude)
        weakref.finalize(rope, _ropes.pop, key, None)
    return _ropes[key]


def packings(kv: KVFormat) -> "kernels.Packings":
    """Return the kernels' coding of a packed format."""
    if kv not in _packed:
        _packed[kv] = kernels.Packings(kv.keys.bits, kv.keys.group, kv.values.bits, kv.values.group)
    return _packed[kv]


def native_pass(rows: Pass) -> "kernels.Pass":
    """Return the pass in the kernels' form."""
    if rows.native is None:
        sequences = rows.sequences
        kv = rows.store.format
        packed = (packings(kv), [group.kind.head_dim for group in rows.store.groups]) if kv.packed else ()
        rows.native = kernels.Pass(
            [sequence.count for sequence in sequences],
            [sequence.offset for sequence in sequences],
            [sequence.phase == "prefill" for sequence in sequences],
            [sequence.tables for sequence in sequences],
            [group.slabs for group in rows.store.groups],
            *packed,
        )
    return rows.native
