// Attention: per-head norm, rotation, cache write and causal attention over the cache, split among threads.
//
// B sequences, T new tokens each, H query heads on Hkv key/value heads of size D, cache entries [0, offset) in use.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "kernels.h"
#include "pool.h"
#include "rope.h"

namespace headrace {

// What new tokens are, which alone decides how they attend: tokens of a prompt, or the next token, alone or with guesses at those
// behind it. A token's result has the same bits whatever T is.
enum class Phase : std::uint8_t { prefill, decode };

struct AttendCall {
  const float* qkv = nullptr;  // (B, T, (H + 2 Hkv) * D)
  void* keys = nullptr;        // (B, Hkv, capacity, D)
  void* values = nullptr;      // (B, Hkv, capacity, D)
  Type kv_type = Type::f32;
  int64_t batch = 0, length = 0;  // B, T
  Phase phase = Phase::prefill;
  int64_t heads = 0, kv_heads = 0, dim = 0;
  int64_t capacity = 0, offset = 0;  // offset + T <= first + capacity
  int64_t first = 0;                 // the position of the buffers' first row: a window's cache drops what is behind it
  const float* q_norm = nullptr;     // (D) or nullptr
  const float* k_norm = nullptr;
  float norm_eps = 0;
  Rope* rope = nullptr;
  ScoreRule rule{1.0f, 0.0f};
  const float* sinks = nullptr;  // (H) a score per head that takes its share of the softmax and adds nothing, or nullptr
  int64_t window = 0;    // positions a query sees, itself included; 0 for all
  float* out = nullptr;  // (B, T, H * D)
};

void run_attend(Pool& pool, const Kernels& kernels, const AttendCall& call);

// The ways to attend, once q (B, H, T, D) is placed and the cache is written: decode; prefill; prefill with products in
// integers, over K/V in half precision.
void attend_decode(Pool& pool, const Kernels& kernels, const AttendCall& call, const float* q);
void attend_prefill(Pool& pool, const Kernels& kernels, const AttendCall& call, const float* q);
void attend_rounded(Pool& pool, const Kernels& kernels, const AttendCall& call, const float* q);

// Where a query's softmax begins: at nothing, or at its head's sink.
inline Softmax first_state(const AttendCall& call, int64_t head, float* acc) {
  if (call.sinks != nullptr) return {call.sinks[head], 1.0f, acc};
  return {-std::numeric_limits<float>::infinity(), 0.0f, acc};
}

// The first cache entry that the query at `position` sees.
inline int64_t first_seen(const AttendCall& call, int64_t position) {
  return call.window > 0 && position >= call.window ? position - call.window + 1 : 0;
}

// The first entry of the block of `entries` with what the query at `position` sees first; none that the cache has dropped. Blocks
// begin at multiples of their size, so that an entry has the same neighbours whatever the pass.
inline int64_t first_block(const AttendCall& call, int64_t position, int64_t entries) {
  return std::max(call.first, first_seen(call, position) / entries * entries);
}

// The cache of one key/value head of one sequence, to be indexed by position.
inline HeadCache head_cache(const AttendCall& call, int64_t sequence, int64_t kv_head) {
  const int64_t row = (sequence * call.kv_heads + kv_head) * call.capacity - call.first;
  const int64_t at = row * call.dim * size_of(call.kv_type);
  return {static_cast<const char*>(call.keys) + at, static_cast<const char*>(call.values) + at, call.dim,
          call.kv_type};
}

}  // namespace headrace
