// Norm and rotation of queries and keys, the cache write, then attention by phase (attend.h).
#include "attend.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "scratch.h"

namespace headrace {
namespace {

constexpr int64_t kTaskFloats = 1 << 12;  // numbers per task

// Normalize (unless norm_all) and rotate a head (D) in place. `row` of the table: the token's row in the pass. nullptr: no such step.
void place(const Kernels& kernels, const AttendCall& call, const Rope::Table* table, int64_t row, const float* norm,
           float* head) {
  if (call.norm_all) norm = nullptr;  // done
  if (norm != nullptr && !call.norm_last) kernels.rms_norm(head, norm, call.norm_eps, call.dim, head);
  if (table != nullptr) call.rope->rotate(*table, row, head);
  if (norm != nullptr && call.norm_last) kernels.rms_norm(head, norm, call.norm_eps, call.dim, head);
}

// The factor of the query at a position (AttendCall::growth).
float growth_at(const AttendCall& call, int64_t position) {
  return 1.0f + call.growth * std::log(1.0f + static_cast<float>((position + call.growth_ahead) / call.growth_length));
}

// Heads of a row (heads * D), normalized all together with norm_all: then in Slot::tile, else as they are.
const float* heads_of(const Kernels& kernels, const AttendCall& call, const float* from, const float* norm, int64_t heads) {
  if (!call.norm_all || norm == nullptr) return from;
  float* together = scratch(Slot::tile, heads * call.dim);
  kernels.rms_norm(from, norm, call.norm_eps, heads * call.dim, together);
  return together;
}

// One token, row rows.row + t of the pass: its queries to `q` (query_at), unless its result is unwanted; its keys and values to the cache.
void place_token(const Kernels& kernels, const AttendCall& call, const Rope::Table* table, const SequenceRows& rows,
                 int64_t t, float* q) {
  const int64_t dim = call.dim, row = rows.row + t;
  const float* from = call.qkv + row * call.projected();
  const size_t head_bytes = static_cast<size_t>(dim) * sizeof(float);
  const bool attends = rows.row < call.wanted;
  const float* queries = attends ? heads_of(kernels, call, from, call.q_norm, call.heads) : from;
  for (int64_t h = 0; h < call.heads && attends; ++h) {
    float* to = q + query_at(call, rows, t, h);
    std::memcpy(to, queries + h * dim, head_bytes);
    place(kernels, call, table, row, call.q_norm, to);
    if (call.growth != 0.0f) kernels.rescale(to, growth_at(call, rows.offset + t), dim);
    if (call.packed()) kernels.hadamard(to, dim);
  }
  if (call.parts == 1) return;
  from += call.heads * dim;
  float* head = scratch(Slot::rows, 2 * dim);
  const int64_t position = rows.offset + t, entry = position % kBlock, at = entry * dim * size_of(call.kv_type);
  const float* keys = heads_of(kernels, call, from, call.k_norm, call.kv_heads);
  for (int64_t h = 0; h < call.kv_heads; ++h, from += dim) {
    char* to = rows.blocks[position / kBlock] + h * call.head_bytes;
    const float* value = from + (call.parts - 2) * call.kv_heads * dim;  // with two parts the key, as it is before norm and rotation
    if (call.v_norm != nullptr) {
      kernels.rms_norm(value, call.v_norm, call.norm_eps, dim, head + dim);
      value = head + dim;
    }
    std::memcpy(head, keys + h * dim, head_bytes);
    place(kernels, call, table, row, call.k_norm, head);
    if (call.packed()) {
      if (value != head + dim) std::memcpy(head + dim, value, head_bytes);
      kernels.hadamard(head, dim);
      kernels.hadamard(head + dim, dim);
      kernels.pack_key(head, dim, call.packings.keys, entry, to + call.keys_at);
      kernels.pack_value(head + dim, dim, call.packings.values, entry, to + call.values_at);
    } else {
      kernels.from_float(head, dim, call.kv_type, to + call.keys_at + at);
      kernels.from_float(value, dim, call.kv_type, to + call.values_at + at);
    }
  }
}

// Sines and cosines of every row's position; nullptr without a rotation.
std::shared_ptr<const Rope::Table> rotations(const AttendCall& call) {
  if (call.rope == nullptr) return nullptr;
  std::vector<Rope::Run> runs;
  for (int64_t i = 0; i < call.count; ++i) runs.push_back({call.sequences[i].offset, call.sequences[i].count});
  return call.rope->table(runs);
}

}  // namespace

void run_attend(Pool& pool, const Kernels& kernels, const AttendCall& call) {
  const int64_t tokens = call.rows();
  if (tokens <= 0) return;
  pool.label(Work::attention);
  const auto table = rotations(call);
  float* q = scratch(Slot::shared_rows, tokens * call.heads * call.dim);
  const int64_t step = std::max<int64_t>(1, kTaskFloats / call.projected());
  pool.run((tokens + step - 1) / step, [&](Tasks& tasks) {
    const SequenceRows* rows = call.sequences;
    while (tasks.next()) {
      const int64_t end = std::min(tokens, (tasks.index() + 1) * step);
      for (int64_t i = tasks.index() * step; i < end; ++i) {
        while (i < rows->row) --rows;  // the sequence of row i; a thread that takes another's tasks goes back
        while (i >= rows->row + rows->count) ++rows;
        place_token(kernels, call, table.get(), *rows, i - rows->row, q);
      }
    }
  });
  run_attend_heads(pool, kernels, call, q);
}

void run_rotate(Pool& pool, const RotateCall& call) {
  const auto table = call.rope->table({{call.offset, call.tokens}});
  const int64_t rows = call.count * call.tokens, step = std::max<int64_t>(1, kTaskFloats / call.dim);
  pool.label(Work::attention);
  pool.run((rows + step - 1) / step, [&](Tasks& tasks) {
    while (tasks.next()) {
      const int64_t end = std::min(rows, (tasks.index() + 1) * step);
      for (int64_t i = tasks.index() * step; i < end; ++i) {
        float* head = call.out + i * call.dim;
        std::memcpy(head, call.x + i * call.dim, static_cast<size_t>(call.dim) * sizeof(float));
        call.rope->rotate(*table, i % call.tokens, head);
      }
    }
  });
}

void run_attend_heads(Pool& pool, const Kernels& kernels, const AttendCall& call, const float* q) {
  pool.label(Work::attention);
  attend_decode(pool, kernels, call, q);
  const bool rounds = kernels.rounds_attention && (call.packed() || call.kv_type != Type::f32);
  for (int64_t i = 0; i < call.count; ++i) {
    const SequenceRows& rows = call.sequences[i];
    const bool plain = !rounds || rows.visible != nullptr;  // see attend_rounded in attend.h
    if (rows.phase == Phase::prefill && rows.row < call.wanted) (plain ? attend_prefill : attend_rounded)(pool, kernels, call, rows, q);
  }
}

}  // namespace headrace
