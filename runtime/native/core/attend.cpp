// Placing queries, keys and values; then attending in the way of the phase.
#include "attend.h"

#include <algorithm>
#include <cstring>

#include "scratch.h"

namespace headrace {
namespace {

constexpr int64_t kTaskFloats = 1 << 12;  // numbers that one task places

void place(const Kernels& kernels, const AttendCall& call, const Rope::Table* table, int64_t t, const float* norm,
           float* head) {
  if (norm != nullptr) kernels.rms_norm(head, norm, call.norm_eps, call.dim, head);
  if (table != nullptr) Rope::rotate(*table, t, head);
}

// One token's heads: q into the scratch (B, H, T, D), k and v into the cache.
void place_token(const Kernels& kernels, const AttendCall& call, const Rope::Table* table, int64_t b, int64_t t,
                 float* q) {
  const int64_t dim = call.dim;
  const float* from = call.qkv + (b * call.length + t) * (call.heads + 2 * call.kv_heads) * dim;
  const size_t head_bytes = static_cast<size_t>(dim) * sizeof(float);
  for (int64_t h = 0; h < call.heads; ++h, from += dim) {
    float* to = q + ((b * call.heads + h) * call.length + t) * dim;
    std::memcpy(to, from, head_bytes);
    place(kernels, call, table, t, call.q_norm, to);
  }
  float* head = scratch(Slot::rows, dim);
  const int64_t row_bytes = dim * size_of(call.kv_type);
  for (int64_t h = 0; h < call.kv_heads; ++h, from += dim) {
    const int64_t at = ((b * call.kv_heads + h) * call.capacity + call.offset - call.first + t) * row_bytes;
    std::memcpy(head, from, head_bytes);
    place(kernels, call, table, t, call.k_norm, head);
    kernels.from_float(head, dim, call.kv_type, static_cast<char*>(call.keys) + at);
    kernels.from_float(from + call.kv_heads * dim, dim, call.kv_type, static_cast<char*>(call.values) + at);
  }
}

}  // namespace

void run_attend(Pool& pool, const Kernels& kernels, const AttendCall& call) {
  const int64_t tokens = call.batch * call.length;
  if (tokens <= 0) return;
  pool.label(Work::attention);
  std::shared_ptr<const Rope::Table> table;
  if (call.rope != nullptr) table = call.rope->table(call.offset, call.length);
  float* q = scratch(Slot::shared_rows, tokens * call.heads * call.dim);
  const int64_t token_floats = (call.heads + 2 * call.kv_heads) * call.dim;
  const int64_t step = std::max<int64_t>(1, kTaskFloats / token_floats);
  pool.run((tokens + step - 1) / step, [&](Tasks& tasks) {
    while (tasks.next()) {
      const int64_t end = std::min(tokens, (tasks.index() + 1) * step);
      for (int64_t i = tasks.index() * step; i < end; ++i) {
        place_token(kernels, call, table.get(), i / call.length, i % call.length, q);
      }
    }
  });
  if (call.phase == Phase::decode) {
    attend_decode(pool, kernels, call, q);
  } else if (kernels.rounds_attention && call.kv_type != Type::f32) {
    attend_rounded(pool, kernels, call, q);
  } else {
    attend_prefill(pool, kernels, call, q);
  }
}

}  // namespace headrace
