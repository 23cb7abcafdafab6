"""Bodies of the Metal kernels in `runtime.ops.metal`, without the signature, which MLX generates.

Sums are in float32. Values are rounded to the arrays' type T where the operations of the stock twin end.
"""

from collections.abc import Sequence
from functools import lru_cache


@lru_cache(maxsize=8)
def add_norms_source(post: bool, scaled: bool, norm: bool) -> str:
    """Return the body of the kernel of `add_norms`."""
    scale = "\n    held[n] = float(T(held[n] * float(scalar[0])));" if scaled else ""
    total = _OVER_ROW.format(
        each=f"held[n] = float(T(float(residual[row + i]) + held[n]));{scale}\n    total[row + i] = T(held[n]);"
    )
    parts = [_ROW_BEGIN, _row_norm("post", "held[n] = {value};") if post else "", total]
    return "".join([*parts, _row_norm("weight", "normed[row + i] = T({value});") if norm else ""])


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
_OVER_ROW = """
for (int n = 0; n < 4 * STEPS; ++n) {{
  const int i = (n / 4 * THREADS + thread) * 4 + n % 4;
  if (i < WIDTH) {{
    {each}
  }}
}}
"""
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
def place_heads_source(names: Sequence[str], normed: Sequence[str], rotated: bool, norm_last: bool) -> str:
    """Return the body of the kernel of `place_heads`. normed: parts with weights of norms; values have none."""
    rotation = _ROTATION if rotated else ""
    parts = [_HEAD_BEGIN]
    first = "0"
    for name in names:
        norm = _HEAD_NORM.format(weight=f"float({name}_norm[i * {name}_norm_strides[0]])") if name in normed else ""
        steps = [rotation, norm] if norm_last else [norm, rotation]
        if name == "v":
            steps = [_HEAD_NORM.format(weight="1.0f")]
        parts.append(_HEAD.format(name=name, NAME=name.upper(), first=first, steps="".join(steps)))
        first += f" + {name.upper()}_HEADS"
    return "".join(parts)


_HEAD_BEGIN = """
const int lane = thread_index_in_simdgroup;
const int head = thread_position_in_grid.y;
const int length = q_shape[1];
const int64_t batch = thread_position_in_grid.z / length;
const int64_t token = thread_position_in_grid.z % length;
float held[D / 32];
"""
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
