"""Attention over packed K/V as one Metal kernel; its twin is `runtime.ops.packed`.

A threadgroup has one query, and each of its SIMD groups every so many entries, with a softmax state that is merged at
the end (FlashDecoding, arXiv:2205.14135). Codes are unpacked in registers, and no scores are stored.

`packed.attend` calls it on a Mac for up to MAX_QUERIES queries. A change follows the rules of `runtime.ops.metal`:
twin, comparison, golden file. tests/runtime/ops/test_metal_attention.py runs the body compiled for the CPU.
"""

import mlx.core as mx

from headrace.runtime.ops import metal
from headrace.runtime.ops.kv_format import KVFormat
from headrace.runtime.ops.weights import AttentionSpec

MAX_QUERIES = 8  # of a head; more are unpacked once for all of them
_MEMORY = 4096  # float32 values of a threadgroup's merged parts: 16 KiB, half of a threadgroup's memory
_MAX_HEAD = 512  # values of a head: a lane has D / 32 of them in registers, of the query and of the sum

Side = tuple[mx.array, mx.array, mx.array]
"""Keys or values (B, Hkv, S, ...): codes, scales, offsets."""


def attends(q: mx.array, spec: AttentionSpec) -> bool:
    """Return whether the kernel takes these queries (B, H, T, D)."""
    return q.shape[2] <= MAX_QUERIES and spec.head_dim % 32 == 0 and spec.head_dim <= _MAX_HEAD and metal.runs()


def attend(q: mx.array, keys: Side, values: Side, spec: AttentionSpec, kv: KVFormat) -> mx.array:
    """Attend with the queries of the last positions (B, H, T, D) -> (B, H, T, D)."""
    batch, heads, length, dim = q.shape
    groups = min(32, _MEMORY // dim)  # SIMD groups of a threadgroup: 32 are Metal's most
    inputs = {"q": q}
    for name, side in (("k", keys), ("v", values)):
        inputs |= dict(zip((f"{name}_codes", f"{name}_scales", f"{name}_offsets"), side, strict=True))
    if spec.sinks is not None:
        inputs["sinks"] = spec.sinks
    template: list[tuple[str, object]] = [("T", q.dtype), ("D", dim), ("GROUPS", groups), ("WINDOW", spec.window or 0)]
    for name, coding in (("K", kv.keys), ("V", kv.values)):
        template += [(f"{name}_BITS", coding.bits), (f"{name}_GROUP", coding.group)]
    template += [("SCALE", metal.bits_of(spec.scale)), ("SOFTCAP", metal.bits_of(spec.softcap or 0.0))]
    [out] = metal.launch(
        "headrace_attend_codes" + ("_sinks" if spec.sinks is not None else ""),
        source(sinks=spec.sinks is not None),
        inputs,
        {"attended": (q.shape, q.dtype)},
        strided=True,
        grid=(32 * groups, heads, batch * length),
        threadgroup=(32 * groups, 1, 1),
        template=template,
    )
    return out


def source(*, sinks: bool) -> str:
    """Return the body of the kernel."""
    first = ""
    if sinks:
        first = "if (group == 0) {\n  best = float(sinks[head * sinks_strides[0]]);\n  sum = 1.0f;\n}"
    return _BEGIN + first + _ENTRIES + _MERGE


def _value(side: str) -> str:
    """Return the value of dimension i of entry n: its group's scale * code + offset.

    For keys ("k"), where AT(codes) is batch * k_codes_strides[0] + kv * k_codes_strides[1] + n * k_codes_strides[2]:

        float(k_scales[AT(scales) + i / K_GROUP * k_scales_strides[3]])
            * float((k_codes[AT(codes) + i * K_BITS / 32] >> (i * K_BITS % 32)
                     | (i * K_BITS % 32 + K_BITS > 32 ? rest : 0u)) & ((1u << K_BITS) - 1))
            + float(k_offsets[AT(offsets) + i / K_GROUP * k_offsets_strides[3]])

    `rest` is from the next dword. The codes of an entry are contiguous, so they need no strides[3].
    """
    at = f"batch * {side}_{{0}}_strides[0] + kv * {side}_{{0}}_strides[1] + n * {side}_{{0}}_strides[2]"
    bits = f"{side.upper()}_BITS"
    group = f"{side.upper()}_GROUP"
    word = f"{side}_codes[{at.format('codes')} + i * {bits} / 32"
    # A code of 5 or 6 bits may begin in one dword and end in the next.
    rest = f"(i * {bits} % 32 + {bits} > 32 ? {word} + 1] << (32 - i * {bits} % 32) : 0u)"
    code = f"({word}] >> (i * {bits} % 32) | {rest}) & ((1u << {bits}) - 1)"
    scale, offset = (
        f"float({side}_{part}[{at.format(part)} + i / {group} * {side}_{part}_strides[3]])"
        for part in ("scales", "offsets")
    )
    return f"{scale} * float({code}) + {offset}"


# The query in registers: a lane has D / 32 neighbouring values. `held` is the sum of weighted values so far, `best` the
# largest score, and `sum` that of the weights relative to it.
_BEGIN = """
const int lane = thread_index_in_simdgroup;
const int group = simdgroup_index_in_threadgroup;
const int head = threadgroup_position_in_grid.y;
const int length = q_shape[2];
const int64_t batch = threadgroup_position_in_grid.z / length;
const int token = threadgroup_position_in_grid.z % length;
const int64_t kv = head / (q_shape[1] / k_codes_shape[1]);
const int last = k_codes_shape[2] - length + token;
const int first = WINDOW > 0 ? metal::max(0, last - WINDOW + 1) : 0;
const float scale = as_type<float>(SCALE), softcap = as_type<float>(SOFTCAP);
float query[D / 32], held[D / 32];
for (int j = 0; j < D / 32; ++j) {
  const int i = lane * (D / 32) + j;
  const int64_t at = batch * q_strides[0] + head * q_strides[1] + token * q_strides[2] + i * q_strides[3];
  query[j] = float(T(float(q[at]) * scale));
  held[j] = 0.0f;
}
float best = -3.0e38f, sum = 0.0f;
"""
# Each SIMD group's entries, one after the other (online softmax): a larger score scales down all that is held.
_ENTRIES = f"""
for (int64_t n = first + group; n <= last; n += GROUPS) {{
  float score = 0.0f;
  for (int j = 0; j < D / 32; ++j) {{
    const int i = lane * (D / 32) + j;
    score += query[j] * ({_value("k")});
  }}
  score = simd_sum(score);
  score = SOFTCAP != 0 ? metal::precise::tanh(score / softcap) * softcap : score;
  const float most = metal::max(best, score);
  const float kept = metal::precise::exp(best - most), weight = metal::precise::exp(score - most);
  best = most;
  sum = sum * kept + weight;
  for (int j = 0; j < D / 32; ++j) {{
    const int i = lane * (D / 32) + j;
    held[j] = held[j] * kept + weight * ({_value("v")});
  }}
}}
"""
# The groups' states, through the threadgroup's memory, scaled to the largest score of all.
_MERGE = """
threadgroup float bests[GROUPS];
threadgroup float sums[GROUPS];
threadgroup float parts[GROUPS * D];
if (lane == 0) {
  bests[group] = best;
  sums[group] = sum;
}
for (int j = 0; j < D / 32; ++j) {
  parts[group * D + lane * (D / 32) + j] = held[j];
}
threadgroup_barrier(mem_flags::mem_threadgroup);
float most = bests[0], total = 0.0f;
for (int g = 1; g < GROUPS; ++g) {
  most = metal::max(most, bests[g]);
}
for (int g = 0; g < GROUPS; ++g) {
  total += sums[g] * metal::precise::exp(bests[g] - most);
}
for (int i = thread_position_in_threadgroup.x; i < D; i += 32 * GROUPS) {
  float merged = 0.0f;
  for (int g = 0; g < GROUPS; ++g) {
    merged += parts[g * D + i] * metal::precise::exp(bests[g] - most);
  }
  attended[((batch * q_shape[1] + head) * length + token) * D + i] = T(merged / total);
}
"""
