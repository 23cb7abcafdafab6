"""Activations in stock MLX: SiLU, GELU (tanh approximation, exact, sparse), clamped SiLUs, sigmoid gates, xIELU, SiTU.

`reference.glu` and `norm_glu` use them on every device, `native` for those that its kernels lack. A name stands in
config.json, in `ACTIVATIONS` or `unit`, and for the kernels in runtime/native. tests/parity/test_mlx_lm_families.py
compares logits with mlx-lm's, and tests/runtime/ops/test_native_kernels.py the kernels with these.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx


class Xielu(NamedTuple):
    """Numbers of xIELU (Huang and Schlag, arXiv:2411.13010), which gates nothing.

    positive x^2 + beta x for x > 0, else negative (e^min(x, eps) - 1 - x) + beta x.
    """

    positive: float
    negative: float
    beta: float
    eps: float


class BoundedSilu(NamedTuple):
    """The bound of a gated SiLU (Step 3.5): min(silu(gate), limit) * up, with up in [-limit, limit]."""

    limit: float


class SparseGelu(NamedTuple):
    """A gated GELU of few gates (Gemma 3n): gelu(max(0, gate - mean - cutoff * deviation)) * up.

    cutoff: in standard deviations of a token's gates.
    """

    cutoff: float


class SituGate(NamedTuple):
    """A gated SiLU with soft bounds (SiTU, Kimi K3): a tanh(gate / a) sigmoid(gate) * b tanh(up / b), in float32."""

    gate_bound: float  # a
    up_bound: float | None  # b; None: up as it is


GatedCurve = BoundedSilu | SparseGelu | SituGate
Curve = Xielu | GatedCurve
"""An activation with numbers of its own."""
Elementwise = Callable[..., mx.array]
"""A function of arrays of one shape, and of numbers."""


def _silu_gated(gate: mx.array, up: mx.array) -> mx.array:
    return gate * mx.sigmoid(gate) * up


def _gelu_gated(gate: mx.array, up: mx.array) -> mx.array:
    # 0.5 (1 + tanh z) = sigmoid(2 z), without cancellation. Terms are paired to shorten the chain: MLX compiles at most
    # 11 operations deep into a kernel, and a product counts two.
    # z = sqrt(2 / pi) (x + 0.044715 x^3), so the factors of 2 z are 2 sqrt(2 / pi), and 0.044715 times that.
    doubled = 1.5957691216057308 * gate + mx.square(gate) * (0.07135481627260025 * gate)
    return gate * mx.sigmoid(doubled) * up


def _clamped_gated(gate: mx.array, up: mx.array) -> mx.array:
    """GPT-OSS: its limit of 7 and the factor 1.702 of its SiLU are the same in all of its checkpoints."""
    gate = mx.minimum(gate, 7.0)
    up = mx.clip(up, -7.0, 7.0)
    return gate * mx.sigmoid(1.702 * gate) * (up + 1)


def _bounded_gated(gate: mx.array, up: mx.array, limit: mx.array) -> mx.array:
    return mx.minimum(gate * mx.sigmoid(gate), limit) * mx.clip(up, -limit, limit)


def _sparse_gelu_gated(gate: mx.array, up: mx.array, cutoff: mx.array) -> mx.array:
    wide = gate.astype(mx.float32)  # a variance of half-precision numbers would lose most of its digits
    threshold = wide.mean(axis=-1, keepdims=True) + cutoff * wide.std(axis=-1, keepdims=True)
    return _gelu_gated(mx.maximum(wide - threshold, 0).astype(gate.dtype), up)


def _situ_gated(gate: mx.array, up: mx.array, gate_bound: mx.array, *up_bound: mx.array) -> mx.array:
    """Return the product. up_bound: one number, or none."""
    wide_gate = gate.astype(mx.float32)
    wide_up = up.astype(mx.float32)
    for bound in up_bound:
        wide_up = bound * mx.tanh(wide_up / bound)
    return (gate_bound * mx.tanh(wide_gate / gate_bound) * mx.sigmoid(wide_gate) * wide_up).astype(up.dtype)


def _sigmoid_gated(gate: mx.array, up: mx.array) -> mx.array:
    return mx.sigmoid(gate) * up


def _erf_gelu(x: mx.array) -> mx.array:
    return 0.5 * x * (1 + mx.erf(x * 0.7071067811865476))  # 1 / sqrt(2)


def _erf_gelu_gated(gate: mx.array, up: mx.array) -> mx.array:
    return _erf_gelu(gate) * up


def _relu_gated(gate: mx.array, up: mx.array) -> mx.array:
    return mx.maximum(gate, 0) * up


def _relu2_gated(gate: mx.array, up: mx.array) -> mx.array:
    return mx.square(mx.maximum(gate, 0)) * up


def _xielu(x: mx.array, positive: mx.array, negative: mx.array, beta: mx.array, eps: mx.array) -> mx.array:
    below = negative * (mx.expm1(mx.minimum(x, eps)) - x)
    return mx.where(x > 0, positive * mx.square(x), below) + beta * x


@lru_cache(maxsize=1024)
def _numbers(curve: Curve, dtype: mx.Dtype) -> list[mx.array]:
    """Return a curve's numbers as arrays, so that one compiled kernel serves all layers."""
    numbers = [mx.array(number, dtype) for number in curve if number is not None]
    mx.eval(numbers)  # once; unevaluated, they would be made in every step
    return numbers


def unit(projected: mx.array, activation: str | Curve, *, compiled: bool) -> mx.array:
    """Return act(gate) * up of rows (.., 2 F) with gate before up, or act(up) of up alone, (.., F).

    Those that gate nothing are "relu2", "tanh_gelu", "erf_gelu" and xIELU.
    """
    if isinstance(activation, Xielu):
        return _form(_xielu, compiled)(projected, *_numbers(activation, projected.dtype))
    if activation == "relu2":
        return mx.square(mx.maximum(projected, 0))  # gates nothing (So et al., arXiv:2109.08668)
    if activation == "tanh_gelu":
        return _form(_gelu_gated, compiled)(projected, mx.array(1, projected.dtype))
    if activation == "erf_gelu":
        return _form(_erf_gelu, compiled)(projected)
    gate, up = mx.split(projected, 2, axis=-1)
    return gated(gate, up, activation, compiled=compiled)


def gated(gate: mx.array, up: mx.array, activation: str | GatedCurve, *, compiled: bool) -> mx.array:
    """Return act(gate) * up, (.., F) each."""
    if isinstance(activation, BoundedSilu):
        return _form(_bounded_gated, compiled)(gate, up, *_numbers(activation, up.dtype))
    if isinstance(activation, SparseGelu):
        return _sparse_gelu_gated(gate, up, *_numbers(activation, mx.float32))
    if isinstance(activation, SituGate):
        return _form(_situ_gated, compiled)(gate, up, *_numbers(activation, mx.float32))
    return _form(ACTIVATIONS[activation], compiled)(gate, up)


def _form(function: Elementwise, compiled: bool) -> Elementwise:
    """Return a function of this file, compiled or as it is."""
    if compiled:
        compiled_function: Elementwise = _COMPILED[function]
        return compiled_function
    return function


ACTIVATIONS: dict[str, Elementwise] = {
    "silu": _silu_gated,
    "gelu": _gelu_gated,
    "clamped": _clamped_gated,
    "sigmoid": _sigmoid_gated,
    "gated_erf_gelu": _erf_gelu_gated,
    "gated_relu": _relu_gated,
    "gated_relu2": _relu2_gated,
}
STOCK_ONLY = frozenset(("erf_gelu", "gated_erf_gelu", "gated_relu", "gated_relu2"))
"""Names that the native kernels lack."""
# Compiled, the chain is one kernel for every shape. Not on the CPU, where MLX would run a C++ compiler first.
# `_sparse_gelu_gated` is not among them: it takes the mean of a row.
_ELEMENTWISE: list[Elementwise] = [*ACTIVATIONS.values(), _erf_gelu, _bounded_gated, _situ_gated, _xielu]
_COMPILED = {function: mx.compile(function, shapeless=True) for function in _ELEMENTWISE}
