"""Metal kernels of headrace's own, generated for `mx.fast.metal_kernel`. A stock twin defines each of them.

`add_norms` is a residual sum with the norms before and after it, `place_heads` the norms and rotations of a layer's
heads. CUDA, the CPU and HEADRACE_KERNELS=reference run the twins, and so does a Mac on which a kernel does not compile
or differs from its twin (`status`). No kernel writes into an input: MLX's encoder orders kernels by their outputs.

A change of a kernel changes its twin, the comparison in `metal_check.py`, and the golden file of sources
(`python -m tests.metal`). tests/runtime/ops/test_metal.py also compiles the bodies for the CPU and compares results.
"""

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import mlx.core as mx
from msgspec import Struct

from headrace.runtime.config import environment
from headrace.runtime.ops.weights import AttentionSpec

# The bodies of the kernels below have the first two as plain numbers, 32 and 4.
_LANES = 32  # threads of a SIMD group
_READS = 4  # neighbouring values that a thread reads
_MAX_THREADS = 1024  # of a threadgroup
_HEADS = 4  # heads of a threadgroup
_MAX_WIDTH = 4 * _READS * _MAX_THREADS  # values of a row: 16 a thread, which stay in registers
_MAX_HEAD = 576  # values of a head, as well: a latent with its key


class MetalStatus(Struct, frozen=True):
    """Availability of the kernels, and the reason if there are none."""

    available: bool
    reason: str = ""


def launch(
    name: str,
    source: str,
    inputs: dict[str, mx.array],
    outputs: Mapping[str, tuple[tuple[int, ...], mx.Dtype]],
    *,
    strided: bool = False,
    **options: object,
) -> list[mx.array]:
    """Queue a kernel, and return its outputs.

    name: of the kernel.
    source: the body of its function, in Metal.
    inputs: arrays by their names in the source.
    outputs: shape and dtype by name.
    strided: the source reads by strides; else MLX copies inputs that are not contiguous.
    options: grid, threadgroup and template of `mx.fast.metal_kernel`.
    """
    kernel = kernel_of(name, source, tuple(inputs), tuple(outputs), strided)
    shapes, dtypes = zip(*outputs.values(), strict=True)
    launched: list[mx.array] = kernel(
        inputs=list(inputs.values()), output_shapes=list(shapes), output_dtypes=list(dtypes), **options
    )
    return launched


@lru_cache(maxsize=256)
def kernel_of(name: str, source: str, inputs: tuple[str, ...], outputs: tuple[str, ...], strided: bool) -> Any:
    """Return MLX's kernel for a source, compiled once. inputs and outputs are names; for all else see `launch`."""
    return mx.fast.metal_kernel(
        name=name, input_names=inputs, output_names=outputs, source=source, ensure_row_contiguous=not strided
    )


_forced: list[bool] = []  # by nested `forced` blocks: run the kernels, or their twins
checks: list[Callable[[], str]] = []
"""Functions that return what is wrong with the kernels here, "" if nothing is (`runtime.ops.metal_check`)."""


def runs() -> bool:
    """Return whether the kernels replace their twins."""
    if _forced:
        return _forced[-1]
    return mx.default_device().type != mx.DeviceType.cpu and status().available


@contextmanager
def forced(kernels: bool) -> Iterator[None]:
    """Run the kernels, or their twins, whatever the status is."""
    _forced.append(kernels)
    try:
        yield
    finally:
        _forced.pop()


@lru_cache(maxsize=1)
def status() -> MetalStatus:
    """Return whether this machine runs the kernels: they are compiled once, and compared with their twins."""
    if environment.reference_kernels():
        return MetalStatus(False, "HEADRACE_KERNELS=reference")
    if not mx.metal.is_available():
        return MetalStatus(False, "no Metal")
    try:
        wrong = next((wrong for check in checks if (wrong := check())), "")
        return MetalStatus(not wrong, wrong)
    except (RuntimeError, ValueError) as error:
        return MetalStatus(False, str(error).splitlines()[0])


def add_norms_twin(
    x: mx.array,
    residual: mx.array,
    post_norm: mx.array | None,
    norm: mx.array | None,
    eps: float,
    scalar: mx.array | None = None,
) -> tuple[mx.array, mx.array | None]:
    """Return (residual + x) * scalar and its norm, if `norm` is given; x is normalized first if `post_norm` is given.

    x, residual (B, T, E), post_norm, norm (E,), scalar (1,).
    """
    if post_norm is not None:
        x = mx.fast.rms_norm(x, post_norm, eps)
    total = residual + x
    if scalar is not None:
        total = total * scalar
    if norm is None:
        return total, None
    return total, mx.fast.rms_norm(total, norm, eps)


def add_norms(
    x: mx.array,
    residual: mx.array,
    post_norm: mx.array | None,
    norm: mx.array | None,
    eps: float,
    scalar: mx.array | None = None,
) -> tuple[mx.array, mx.array | None]:
    """Return as `add_norms_twin`, in one kernel if it takes these arrays.

    A threadgroup has a row, and a thread's values stay in registers.
    """
    # Asked first: a fast GPU waits for the host, which builds two of these for each layer.
    if not runs():
        return add_norms_twin(x, residual, post_norm, norm, eps, scalar)
    given = {"post": post_norm, "scalar": scalar, "weight": norm}
    optional = {name: array for name, array in given.items() if array is not None}
    inputs = {"x": x, "residual": residual, **optional}
    width = x.shape[-1]
    alike = len({array.dtype for array in inputs.values()}) == 1 and x.shape == residual.shape
    # A sum alone is one kernel of MLX's already.
    if not optional or not alike or width > _MAX_WIDTH:
        return add_norms_twin(x, residual, post_norm, norm, eps, scalar)
    threads = min(_MAX_THREADS, -(-width // (_READS * _LANES)) * _LANES)  # whole SIMD groups, _READS values a thread
    names = ["total"] if norm is None else ["total", "normed"]
    total, *normed = launch(
        "_".join(["headrace_add_norms", *optional]),
        _add_norms_source(post_norm is not None, scalar is not None, norm is not None),
        inputs,
        dict.fromkeys(names, (x.shape, x.dtype)),
        grid=(threads, x.size // width, 1),
        threadgroup=(threads, 1, 1),
        template=[("T", x.dtype), ("WIDTH", width), ("THREADS", threads), ("EPS", bits_of(eps))],
    )
    return total, next(iter(normed), None)


def places_heads(parts: Sequence[mx.array], spec: AttentionSpec, *, together: bool) -> bool:
    """Return whether `place_heads` takes these projections, and saves launches over stock operations.

    together: these rotate queries and keys at once. A dimension and the one that it turns with are in one thread.
    """
    norms = [norm for norm in (spec.q_norm, spec.k_norm) if norm is not None]
    rope = spec.rope
    launches = len(norms) + spec.v_norm
    fits = spec.head_dim % _LANES == 0 and spec.head_dim <= _MAX_HEAD
    if rope is not None:
        rotations = 1 if together else min(2, len(parts))  # of queries, and of keys
        launches += rotations * (1 + (rope.amplitude != 1.0))
        fits = fits and rope.dims % (2 * _LANES) == 0 and rope.periods.dtype == mx.float32
    alike = all(norm.size == spec.head_dim and norm.dtype == parts[0].dtype for norm in norms)
    return fits and alike and launches > 1 and runs()


def place_heads(parts: Sequence[mx.array], offset: mx.array, spec: AttentionSpec) -> list[mx.array]:
    """Return heads with norms and rotation applied: (B, T, heads * D) each -> (B, heads, T, D) each.

    parts: q, then k if the layer has keys, then v if it is normalized. offset (1,) or (B,) int32: position of the first
    token. A SIMD group has a head of a token.
    """
    # The kernel's arguments by name; `_place_heads_source` reads these names.
    batch, length, _ = parts[0].shape
    names = ("q", "k", "v")[: len(parts)]
    rope = spec.rope
    heads = {name: part.shape[-1] // spec.head_dim for name, part in zip(names, parts, strict=True)}
    inputs = dict(zip(names, parts, strict=True))
    if spec.q_norm is not None:
        inputs["q_norm"] = spec.q_norm
    if spec.k_norm is not None and len(parts) > 1:
        inputs["k_norm"] = spec.k_norm
    if rope is not None:
        inputs |= {"periods": rope.periods, "offset": offset}

    # Constants of the compiled kernel, one for each combination
    template: list[tuple[str, object]] = [("T", parts[0].dtype), ("D", spec.head_dim), ("EPS", bits_of(spec.norm_eps))]
    template += [(f"{name.upper()}_HEADS", heads.get(name, 0)) for name in "qkv"]
    if rope is not None:
        template += [("DIMS", rope.dims), ("AMPLITUDE", bits_of(rope.amplitude))]
    normed = tuple(name[0] for name in inputs if name.endswith("norm"))
    return launch(
        "_".join(["headrace_place_heads", *list(inputs), "last" if spec.norm_last else "first"]),
        _place_heads_source(names, normed, rope is not None, spec.norm_last),
        inputs,
        {f"{name}_out": ((batch, heads[name], length, spec.head_dim), parts[0].dtype) for name in names},
        strided=True,
        grid=(_LANES, sum(heads.values()), batch * length),
        threadgroup=(_LANES, _HEADS, 1),
        template=template,
    )


@lru_cache(maxsize=64)
def bits_of(value: float) -> int:
    """Return the bits of a float32 as an int32, which a template takes."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


# Bodies of the kernels, without the signature, which MLX generates. Sums are in float32. Values are rounded to type T,
# that of the arrays, where the operations of the twin end.


@lru_cache(maxsize=8)
def _add_norms_source(post: bool, scaled: bool, norm: bool) -> str:
    """Return the body of the kernel of `add_norms`."""
    scale = ""
    if scaled:
        scale = "\n    held[n] = float(T(held[n] * float(scalar[0])));"
    total = _OVER_ROW.format(
        each=f"held[n] = float(T(float(residual[row + i]) + held[n]));{scale}\n    total[row + i] = T(held[n]);"
    )
    source = _ROW_BEGIN
    if post:
        source += _row_norm("post", "held[n] = {value};")
    source += total
    if norm:
        source += _row_norm("weight", "normed[row + i] = T({value});")
    return source


# `add_norms`: values of a row in registers, 4 neighbours a thread and step; those past the row are zeros.
_ROW_BEGIN = """
constexpr int STEPS = (WIDTH + 4 * THREADS - 1) / (4 * THREADS);
const int thread = thread_position_in_threadgroup.x;
const int lane = thread_index_in_simdgroup;
const size_t row = size_t(threadgroup_position_in_grid.y) * WIDTH;
const float eps = as_type<float>(EPS);
float held[4 * STEPS];
for (int n = 0; n < 4 * STEPS; ++n) {
  const int i = (n / 4 * THREADS + thread) * 4 + n % 4;
  held[n] = i < WIDTH ? float(x[row + i]) : 0.0f;
}
"""
# A loop over the values of a thread that are in the row. {each}: statements on value n, at index i.
_OVER_ROW = """
for (int n = 0; n < 4 * STEPS; ++n) {{
  const int i = (n / 4 * THREADS + thread) * 4 + n % 4;
  if (i < WIDTH) {{
    {each}
  }}
}}
"""
# The factor of a norm: squares are summed by thread, SIMD group, threadgroup. {weight}: prefix of the names.
_ROW_SUM = """
threadgroup float {weight}_sums[32];
float {weight}_sum = 0.0f;
for (int n = 0; n < 4 * STEPS; ++n) {{
  {weight}_sum += held[n] * held[n];
}}
{weight}_sum = simd_sum({weight}_sum);
if (lane == 0) {{
  {weight}_sums[simdgroup_index_in_threadgroup] = {weight}_sum;
}}
threadgroup_barrier(mem_flags::mem_threadgroup);
{weight}_sum = simd_sum(lane < THREADS / 32 ? {weight}_sums[lane] : 0.0f);
const float {weight}_scale = metal::precise::rsqrt({weight}_sum / WIDTH + eps);
"""


def _row_norm(weight: str, store: str) -> str:
    """Return the norm of the held row, for each value of which `store` is done. Threads past the row hold zeros."""
    value = f"float(T(float(T(held[n] * {weight}_scale)) * float({weight}[i])))"
    return _ROW_SUM.format(weight=weight) + _OVER_ROW.format(each=store.format(value=value))


@lru_cache(maxsize=32)
def _place_heads_source(names: Sequence[str], normed: Sequence[str], rotated: bool, norm_last: bool) -> str:
    """Return the body of the kernel of `place_heads`. normed: parts with weights of norms; values have none."""
    rotation = _ROTATION if rotated else ""
    parts = [_HEAD_BEGIN]
    first = "0"
    for name in names:
        norm = ""
        if name in normed:
            norm = _HEAD_NORM.format(weight=f"float({name}_norm[i * {name}_norm_strides[0]])")
        steps = [rotation, norm] if norm_last else [norm, rotation]
        if name == "v":
            steps = [_HEAD_NORM.format(weight="1.0f")]
        parts.append(_HEAD.format(name=name, NAME=name.upper(), first=first, steps="".join(steps)))
        first += f" + {name.upper()}_HEADS"
    return "".join(parts)


# `place_heads`: a SIMD group has a head of a token, and lane l its values l, l + 32, l + 64 and so on.
_HEAD_BEGIN = """
const int lane = thread_index_in_simdgroup;
const int head = thread_position_in_grid.y;
const int length = q_shape[1];
const int64_t batch = thread_position_in_grid.z / length;
const int64_t token = thread_position_in_grid.z % length;
float held[D / 32];
"""
# One part, q, k or v: read a head, norm and rotate it, write it. {first}: heads of the parts before.
_HEAD = """
if (head >= {first} && head < {first} + {NAME}_HEADS) {{
  const int own = head - ({first});
  for (int n = 0; n < D / 32; ++n) {{
    const int i = own * D + lane + 32 * n;
    held[n] = float({name}[batch * {name}_strides[0] + token * {name}_strides[1] + i * {name}_strides[2]]);
  }}
{steps}
  for (int n = 0; n < D / 32; ++n) {{
    {name}_out[((batch * {NAME}_HEADS + own) * length + token) * D + lane + 32 * n] = T(held[n]);
  }}
}}
"""
# The norm of a head. {weight}: of value i.
_HEAD_NORM = """
  float sum = 0.0f;
  for (int n = 0; n < D / 32; ++n) {{
    sum += held[n] * held[n];
  }}
  const float scale = metal::precise::rsqrt(simd_sum(sum) / D + as_type<float>(EPS));
  for (int n = 0; n < D / 32; ++n) {{
    const int i = lane + 32 * n;
    held[n] = float(T(float(T(held[n] * scale)) * {weight}));
  }}
"""
# The rotation: value n turns with value n + DIMS / 64 of the same lane, which is DIMS / 2 further in the head.
_ROTATION = """
  const float amplitude = as_type<float>(AMPLITUDE);
  const float position = float(offset[offset_shape[0] > 1 ? batch : 0] + token);
  for (int n = 0; n < DIMS / 64; ++n) {
    const float angle = position * (1.0f / periods[(lane + 32 * n) * periods_strides[0]]);
    const float cosine = metal::precise::cos(angle), sine = metal::precise::sin(angle);
    const float one = float(T(held[n] * amplitude)), other = float(T(held[n + DIMS / 64] * amplitude));
    held[n] = float(T(one * cosine - other * sine));
    held[n + DIMS / 64] = float(T(one * sine + other * cosine));
  }
"""
