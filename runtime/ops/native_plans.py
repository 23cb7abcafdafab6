"""Weights, layers and passes in the native kernels' form.

Plans of attention, experts and mixers are cached by the id of their specification and dropped with it. A plan of a
whole layer is not: it belongs to the node that `native.fuse` makes.

Arguments go to C++ by position: their order is that of runtime/_native.pyi. A feature that the kernels lack is a
reason to return None here, and the layer then runs one operation at a time (`Decoder._block`).

Guards: tests/runtime/ops/test_native_kernels.py for `attention_plan` and `prepared_matrix`, test_native_experts.py for
`experts_plan`, test_native_recurrent.py for `mixer_plan`, test_passes.py for `native_pass`; for `layer_plan`
tests/parity/test_mlx_lm_families.py, which compares logits of whole models.
"""

import weakref
from collections import Counter
from typing import TYPE_CHECKING

import mlx.core as mx

from headrace.runtime.ops.activations import STOCK_ONLY, Xielu
from headrace.runtime.ops.kv_format import KVFormat
from headrace.runtime.ops.layer_weights import LayerWeights
from headrace.runtime.ops.mixers import MixerSpec
from headrace.runtime.ops.passes import Pass
from headrace.runtime.ops.weights import AttentionSpec, Mixture, Rope, Weight

__all__ = [
    "HEAD_STEP",
    "PreparedWeight",
    "attention_plan",
    "experts_plan",
    "fallbacks",
    "kernels",
    "layer_plan",
    "matrix_of",
    "missing",
    "mixer_plan",
    "native_pass",
    "native_rope",
    "packings",
    "prepared_matrix",
]

HEAD_STEP = 16  # the kernels attend to heads whose sizes are multiples of this, and refuse others

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
# Plans by the id of what they are made of: arrays have no cheap hash. `weakref.finalize` drops a plan with its object,
# before the id is used again.
_plans: "dict[int, kernels.AttentionPlan | None]" = {}  # by id(spec); None: not supported
_mixtures: "dict[int, kernels.ExpertsPlan | None]" = {}  # by id(mixture); None: not prepared
_mixers: "dict[int, kernels.MixerPlan]" = {}  # by id(spec)
_packed: "dict[KVFormat, kernels.Packings]" = {}
_ropes: "dict[int, kernels.Rope]" = {}  # by id(rope); shared by layers


class PreparedWeight(Weight, frozen=True, eq=False):
    """A weight in the kernels' layout; `matrix` is None if they do not support it.

    2-, 4-, 5-, 6- and 8-bit weights are interleaved (runtime/native/core/interleaved.h), so a weight with a matrix
    never goes to the reference: activations other than float32 raise ValueError.
    """

    matrix: "kernels.Matrix | None" = None
    shape: tuple[int, int] = (0, 0)  # (N, K); of a stack, (X * N, K)

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def columns(self) -> int:
        return self.shape[1]


def matrix_of(weight: Weight | None) -> "kernels.Matrix | None":
    """Return the kernels' matrix of a weight; None without one, or if the kernels do not support it."""
    if isinstance(weight, PreparedWeight):
        return weight.matrix
    return None


def layer_plan(layer: LayerWeights, eps: float, activation: str) -> "kernels.LayerPlan | None":
    """Return the plan of a whole layer; None if it has split weights or unsupported parts."""
    if _runs_by_operations(layer, activation):
        return None

    # Every matrix has to be in the kernels' layout.
    into_mixer, out_of_mixer = layer.mixer_ends or (None, None)
    weights = {
        "output": layer.output,
        "gate_up": next(iter(layer.gate_up), None),
        "down": layer.down,
        "gate": layer.gate,
        "down_gate": layer.down_gate,
        "into_mixer": into_mixer,
        "out_of_mixer": out_of_mixer,
    }
    matrices = {name: matrix_of(weight) for name, weight in weights.items()}
    if any(weight is not None and matrices[name] is None for name, weight in weights.items()):
        return None
    qkv = [matrix for weight in layer.qkv if (matrix := matrix_of(weight)) is not None]
    if len(qkv) != len(layer.qkv):
        return None
    into = matrices["into_mixer"]
    out = matrices["out_of_mixer"]
    ends = (into, out) if into is not None and out is not None else None

    # Attention, mixer, experts and own input, in the kernels' form; a part that has none sends the layer back.
    experts = experts_plan(layer.mixture, activation) if layer.mixture is not None else None
    attention = attention_plan(layer.attention) if layer.attention is not None else None
    own_input = _own_input(layer)
    plans = ((layer.mixture, experts), (layer.attention, attention), (layer.own_input, own_input))
    if any(part is not None and plan is None for part, plan in plans):
        return None
    mixer = mixer_plan(layer.mixer) if layer.mixer is not None else None

    curve = None
    if isinstance(layer.curve, Xielu):
        curve = layer.curve
        activation = "xielu"
    return kernels.LayerPlan(
        attention,
        qkv,
        matrices["output"],
        matrices["gate_up"],
        matrices["down"],
        eps,
        activation,
        experts,
        mixer,
        (matrices["gate"], matrices["down_gate"]),
        _layer_norms(layer),
        own_input,
        ends,
        curve,
    )


def _layer_norms(layer: LayerWeights) -> "kernels.LayerNorms":
    """Return a layer's norms and the factor of its output, in the kernels' form."""
    after_dense, before_experts, after_experts = layer.branches or (None, None, None)
    return kernels.LayerNorms(
        layer.input_norm,
        layer.attention_post_norm,
        layer.mlp_norm,
        layer.mlp_post_norm,
        after_dense,
        before_experts,
        after_experts,
        layer.scalar,
    )


def _runs_by_operations(layer: LayerWeights, activation: str) -> bool:
    """Return whether a layer is of a kind that no node computes: it runs one operation at a time."""
    if layer.output is None:  # nothing mixes tokens
        return True
    # Matrices in different formats: those into attention may be, others cannot be one matrix.
    if len(layer.qkv) > 1 and (layer.attention is None or layer.attention.chooser is not None):
        return True
    if len(layer.gate_up) > 1 or bool(layer.gate_up) != (layer.down is not None):
        return True
    # Parallel halves, which both begin at the layer's input: a node computes one half after the other.
    has_feed_forward = bool(layer.gate_up) or layer.mixture is not None
    if layer.mlp_norm is None and layer.attention_post_norm is None and has_feed_forward:
        return True
    if layer.mixer is not None and layer.mixer.bound:  # `native.mix_pass` changes a bounded mixer's input
        return True
    composed = (
        layer.latent,
        layer.mixer_gates,
        layer.head_norms,
        layer.values,
        layer.altup,
        layer.mixes,
        layer.loop_gate,
        layer.inner_norms,
    )
    if layer.later_mixers or any(part is not None for part in composed):
        return True
    if layer.gate is not None and layer.gate.rows != layer.output.columns:  # a gate for each head
        return True
    if layer.down_gate is not None and layer.down_gate.rows > 1:  # it weighs the experts, too
        return True
    if layer.mixture is not None and (layer.mlp_norm is None or layer.mixture.is_composed):
        return True
    if layer.mlp_post_norm is not None and layer.mixture is not None and layer.branches is None:
        return True
    has_other_curve = layer.curve is not None and not isinstance(layer.curve, Xielu)
    return activation in STOCK_ONLY or has_other_curve


def _own_input(layer: LayerWeights) -> "tuple[kernels.Matrix, kernels.Matrix, mx.array] | None":
    """Return the weights of a layer's own input; None without one, or if they were not prepared."""
    if layer.own_input is None:
        return None
    gate = matrix_of(layer.own_input.gate)
    projection = matrix_of(layer.own_input.projection)
    if gate is None or projection is None:
        return None
    return gate, projection, layer.own_input.norm


def experts_plan(m: Mixture, activation: str) -> "kernels.ExpertsPlan | None":
    """Return the plan of a mixture of experts; None if its weights were not prepared."""
    key = id(m)
    if key in _mixtures:
        return _mixtures[key]
    matrices = [matrix_of(weight) for weight in (m.router, m.gate, m.up, m.down)]
    router, gate, up, down = matrices
    plan = None
    is_gate_ready = m.gate is None or gate is not None  # experts may have no gate
    if router is not None and is_gate_ready and up is not None and down is not None:
        routing = m.routing
        plan = kernels.ExpertsPlan(
            router,
            gate,
            up,
            down,
            routing.active,
            routing.normalized,
            activation,
            routing.sigmoid,
            m.correction,
            routing.scale,
            routing.groups,
            m.router_norm,
            m.expert_scale,
            m.residual,
            routing.best,
            routing.shares_first,
        )
    elif any(matrices):
        raise ValueError("the native kernels support only some of a layer's expert weights")
    _mixtures[key] = plan
    weakref.finalize(m, _mixtures.pop, key, None)
    return plan


def prepared_matrix(x: mx.array, w: Weight) -> "kernels.Matrix | None":
    """Return the kernels' matrix of a weight; None, counted as a fallback, if the product runs on the reference."""
    matrix = matrix_of(w)
    if matrix is None:
        reason = "weight was not prepared" if x.dtype == mx.float32 else str(x.dtype)
        fallbacks[f"linear: {reason}"] += 1
    return matrix


def attention_plan(spec: AttentionSpec) -> "kernels.AttentionPlan | None":
    """Return the plan of a layer's attention; None for unsupported head sizes."""
    key = id(spec)
    if key in _plans:
        return _plans[key]
    plan = None
    q_norm = spec.q_norm
    k_norm = spec.k_norm
    if spec.unit_norms:  # the kernels have no norm without weights
        q_norm = mx.ones((spec.head_dim,))
        k_norm = q_norm
    rope = None
    if spec.rope is not None:
        rope = native_rope(spec.rope)
    if spec.head_dim % HEAD_STEP == 0:
        plan = kernels.AttentionPlan(
            spec.heads,
            spec.kv_heads,
            spec.head_dim,
            spec.scale,
            rope,
            q_norm,
            k_norm,
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
        rate = spec.rate
        step_bias = spec.step_bias
        if spec.bound and rate is not None and step_bias is not None:  # `native.mix_pass` has applied both
            rate = -mx.ones_like(rate)
            step_bias = mx.zeros_like(step_bias)
        vectors = (spec.tap_bias, rate, step_bias, spec.skip, spec.norm)
        settings = (spec.norm_first, spec.norm_eps, spec.steps, spec.most_beta)
        flags = (spec.gated, spec.silu, spec.mixes_values)
        _mixers[key] = kernels.MixerPlan(*sizes, spec.taps, *vectors, *settings, spec.wkv or (), *flags)
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
        coding: tuple[kernels.Packings, list[int]] | tuple[()] = ()
        if kv.packed:
            coding = (packings(kv), [group.kind.head_dim for group in rows.store.groups])
        rows.native = kernels.Pass(
            [sequence.count for sequence in sequences],
            [sequence.offset for sequence in sequences],
            [sequence.phase == "prefill" for sequence in sequences],
            [sequence.tables for sequence in sequences],
            [group.slabs for group in rows.store.groups],
            *coding,
        )
    return rows.native
