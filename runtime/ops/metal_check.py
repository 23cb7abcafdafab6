"""Comparison of the Metal kernels with their twins on this machine, once before the first step.

`metal.status` runs it, and headrace then uses the twins for good if one differs. A new kernel needs a line in `pairs`;
a new layout of heads one in `specs`. tests/metal takes the kernels' sources from the same pairs.
"""

from collections.abc import Callable, Iterator
from functools import partial

import mlx.core as mx
from msgspec.structs import replace

from headrace.runtime.ops import attention, metal, metal_attention, packed, reference
from headrace.runtime.ops.kv_format import Q4, Q8, KVFormat
from headrace.runtime.ops.weights import AttentionSpec, Rope

_WIDTHS = (1120, 8192)  # the wider one has threadgroups of 1,024 threads, more than some kernels may have
_ROWS = 2  # more than one, so that strides of rows matter
_TOLERANCE = {mx.float16: 4e-3, mx.bfloat16: 3e-2}  # of the largest value: two roundings


def differing() -> str:
    """Return the first kernel that differs from its twin, "" if none does. Raises RuntimeError if one is broken."""
    for name, kernel, twin in pairs():
        for array, other in zip(kernel, twin, strict=True):
            if not close(array, other):
                return f"{name} differs from stock MLX in {array.dtype}"
    return ""


def close(array: mx.array, other: mx.array) -> bool:
    """Return whether the arrays differ by rounding alone."""
    a = array.astype(mx.float32)
    b = other.astype(mx.float32)
    return array.shape == other.shape and bool(mx.abs(a - b).max() <= _TOLERANCE[array.dtype] * mx.abs(b).max())


def pairs() -> Iterator[tuple[str, list[mx.array], list[mx.array]]]:
    """Yield a kernel's name, its results, and its twin's."""
    for dtype in (mx.float16, mx.bfloat16):
        for width in _WIDTHS:
            x, residual = (_values((1, _ROWS, width), dtype, seed) for seed in (1, 2))
            post = _values((width,), dtype, 3)
            norm = _values((width,), dtype, 4)
            scalar = _values((1,), dtype, 5)
            for before, after, scale in (
                (None, norm, None), (post, None, None), (post, norm, None), (post, norm, scalar),
            ):  # fmt: skip
                yield "add_norms", *_both(partial(metal.add_norms, x, residual, before, after, 1e-6, scale))
        for spec in specs(dtype):
            heads = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
            qkv = _values((1, _ROWS, heads), dtype, 6)
            yield "place_heads", *_both(partial(attention.placed_heads, [qkv], 5000, spec))
        spec = AttentionSpec(6, 2, 128, 0.09, sinks=_values((6,), dtype, 9))
        for kv in (Q8, Q4):
            yield "attend_codes", *_both(partial(_packed, reference.packed_format(kv, 128), spec, dtype))


def _packed(kv: KVFormat, spec: AttentionSpec, dtype: mx.Dtype) -> tuple[mx.array]:
    """Attend with two queries over 67 entries, a number that no count of SIMD groups divides."""
    keys, values = [
        packed.pack(_values((1, spec.kv_heads, 67, spec.head_dim), dtype, seed), coding, dtype)
        for seed, coding in ((10, kv.keys), (11, kv.values))
    ]
    q = _values((1, spec.heads, 2, spec.head_dim), dtype, 12)
    if metal.runs():
        return (metal_attention.attend(q, keys, values, spec, kv),)
    return (packed.over_codes(q.astype(mx.float32), keys, values, spec, kv).astype(dtype),)  # rounds no scores


def _both(function: Callable[[], tuple[mx.array | None, ...]]) -> tuple[list[mx.array], list[mx.array]]:
    """Return the results of a kernel and of its twin."""
    with metal.forced(True):
        result = function()
    with metal.forced(False):
        twin = function()
    return [array for array in result if array is not None], [array for array in twin if array is not None]


def specs(dtype: mx.Dtype) -> Iterator[AttentionSpec]:
    """Yield attention layouts: norms, values normalized, partly rotated heads, an amplitude, latents with their key."""
    rope = Rope(64, 10000.0 ** (mx.arange(32) / 32))
    norms = _values((128,), dtype, 7), _values((128,), dtype, 8)
    spec = AttentionSpec(6, 2, 128, 1.0, rope, *norms)
    yield spec
    yield replace(spec, v_norm=True)
    yield replace(spec, norm_last=True)
    bare = replace(spec, q_norm=None, k_norm=None)
    yield replace(bare, rope=Rope(128, 10000.0 ** (mx.arange(64) / 64), 1.3))
    yield replace(bare, kv_heads=1, head_dim=576, rope=replace(rope, amplitude=1.3))


def _values(shape: tuple[int, ...], dtype: mx.Dtype, seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)
