// Attention: per-head norm, rotation, cache write and causal attention over the cache, split among threads.
//
// A pass has N rows of new tokens, sequence after sequence. A row attends to the entries of its own sequence, in blocks of kBlock
// anywhere in memory. H query heads on Hkv key/value heads of size D.
//
// run_attend places queries in scratch and keys and values in the cache, then calls run_attend_heads. That attends to decode rows of all
// sequences by attend_decode, and to each prompt by attend_rounded or attend_prefill. bind/attend_primitive.cpp and
// bind/layer_primitive.cpp are the callers; bind/cache_blocks.cpp fills in the blocks.
//
// Guard: runtime/native/tests/attention.cpp (plain K/V) and packed.cpp; in Python tests/runtime/ops/test_native_kernels.py,
// test_passes.py (blocks), test_packed_attention.py and test_native_row_bits.py (the same bits in any company).
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "kernels.h"
#include "packed.h"
#include "pool.h"
#include "rope.h"
#include "scratch.h"

namespace headrace {

constexpr int64_t kBlock = kAttendChunk;  // entries

// The phase decides how new tokens attend: prompt tokens, or the next token and its draft tokens. A token's result has the same
// bits in any pass.
enum class Phase : std::uint8_t { prefill, decode };

// One sequence's rows [row, row + count) of a pass, at positions [offset, offset + count).
struct SequenceRows {
  int64_t row = 0, count = 0, offset = 0;
  Phase phase = Phase::prefill;
  // i-th block: entries [i * kBlock, (i + 1) * kBlock). Only entries from `first` on have memory, and blocks before the first that any row
  // sees may be nullptr.
  char* const* blocks = nullptr;
  int64_t first = 0;              // first available entry
  const uint8_t* visible = nullptr;  // (count, offset + count): the entries that a prefill row sees; nullptr: those up to its own
};

struct AttendCall {
  const float* qkv = nullptr;  // (N, projected()): a row has H queries, then Hkv keys, then Hkv values, as far as `parts` says
  const SequenceRows* sequences = nullptr;
  int64_t count = 0;  // of those
  Type kv_type = Type::f32;
  Packings packings;  // if packed, kv_type is unused and SequenceRows::first is 0
  int64_t heads = 0, kv_heads = 0, dim = 0;
  int64_t keys_at = 0;     // bytes from a block's beginning to this layer's keys (kBlock, D), or packed, of the first head,
  int64_t values_at = 0;   // to its values,
  int64_t head_bytes = 0;  // and from a head to the next
  const float* q_norm = nullptr;  // (D) or nullptr; of all heads together with norm_all: (H * D), and (Hkv * D)
  const float* k_norm = nullptr;
  const float* v_norm = nullptr;
  int64_t parts = 3;  // of a token's row: 1 with queries only, whose entries are in the cache; 2 where keys are values, too
  float norm_eps = 0;      // of all three norms
  bool norm_last = false;  // queries and keys are normalized after the rotation
  bool norm_all = false;   // over all heads of a row together, before the rotation
  // The query at position p is multiplied by 1 + growth * log(1 + floor((p + growth_ahead) / growth_length)).
  float growth = 0;
  int64_t growth_length = 1, growth_ahead = 0;
  Rope* rope = nullptr;  // nullptr: no rotation
  ScoreRule rule{1.0f, 0.0f};
  const float* sinks = nullptr;  // (H) softmax scores without values, or nullptr
  int64_t window = 0;    // positions a query sees, itself included; 0 for all
  bool chunked = false;  // it sees those since the last multiple of `window`
  int64_t wanted = std::numeric_limits<int64_t>::max();  // sequences that begin before this row attend; others only append
  float* out = nullptr;  // (N, H * D)

  // Numbers of a row of qkv.
  int64_t projected() const { return (heads + (parts - 1) * kv_heads) * dim; }
  bool packed() const { return packings.keys.bits != 0; }
  // N.
  int64_t rows() const { return count == 0 ? 0 : sequences[count - 1].row + sequences[count - 1].count; }
};

void run_attend(Pool& pool, const Kernels& kernels, const AttendCall& call);

// The same for rotated queries q, (H, count, D) sequence by sequence, whose keys and values are in the cache. q of packed K/V is
// transformed, too (Kernels::hadamard).
void run_attend_heads(Pool& pool, const Kernels& kernels, const AttendCall& call, const float* q);

// Rotate rows x (count, T, D) at positions [offset, offset + T) to out.
struct RotateCall {
  const float* x = nullptr;
  int64_t count = 0, tokens = 0, dim = 0, offset = 0;
  Rope* rope = nullptr;
  float* out = nullptr;
};

void run_rotate(Pool& pool, const RotateCall& call);

// Attention after the cache is written and q rotated, (H, count, D) sequence by sequence; called by run_attend_heads only.
//
// All rows of sequences in phase decode; `visible` is unused.
void attend_decode(Pool& pool, const Kernels& kernels, const AttendCall& call, const float* q);
// The rows of one sequence in phase prefill, in float32: for any K/V, and the only one that reads `visible`.
void attend_prefill(Pool& pool, const Kernels& kernels, const AttendCall& call, const SequenceRows& rows, const float* q);
// The same in 16-bit integers. It is taken where all of these hold: the kernels' rounds_attention, K/V that is packed, float16 or bfloat16
// (never float32), and no `visible`.
void attend_rounded(Pool& pool, const Kernels& kernels, const AttendCall& call, const SequenceRows& rows, const float* q);

// Write a head's output (D) in the values' own terms: packed values are stored as their Hadamard transform, which is its own inverse.
inline void restore_values(const Kernels& kernels, const AttendCall& call, float* out) {
  if (call.packed()) kernels.hadamard(out, call.dim);
}

// Index in q, whose shape is (H, count, D) for one sequence after the other: the first number of the query (D) of row rows.row + t and
// `head`.
inline int64_t query_at(const AttendCall& call, const SequenceRows& rows, int64_t t, int64_t head) {
  return (rows.row * call.heads + head * rows.count + t) * call.dim;
}

// The initial softmax state of a query: empty, or its head's sink.
inline Softmax first_state(const AttendCall& call, int64_t head, float* acc) {
  if (call.sinks != nullptr) return {call.sinks[head], 1.0f, acc};
  return {-std::numeric_limits<float>::infinity(), 0.0f, acc};
}

// The first cache entry that the query at `position` sees.
inline int64_t first_seen(const AttendCall& call, int64_t position) {
  if (call.window <= 0 || position < call.window) return 0;
  return call.chunked ? position / call.window * call.window : position - call.window + 1;
}

// The first entry of the group of `entries` with the first entry that the query at `position` sees. Groups begin at multiples of
// their size, so that an entry has the same neighbours in any pass.
inline int64_t first_met(const AttendCall& call, const SequenceRows& rows, int64_t position, int64_t entries) {
  return std::max(rows.first, first_seen(call, position) / entries * entries);
}

// One head's keys and values in the block of `position`, at row position % kBlock unless packed.
inline HeadCache head_block(const AttendCall& call, const SequenceRows& rows, int64_t kv_head, int64_t position) {
  const char* block = rows.blocks[position / kBlock] + kv_head * call.head_bytes;
  return {block + call.keys_at, block + call.values_at, call.dim, call.kv_type};
}

// Up to `most` contiguous entries [position, position + n) of one head, in rows [begin, begin + n) of kv. Packed ones are unpacked into
// Slot::unpacked, and valid until its next use by the thread.
struct Entries {
  HeadCache kv;
  int64_t begin;
};

inline Entries entries_at(const Kernels& kernels, const AttendCall& call, const SequenceRows& rows, int64_t kv_head,
                          int64_t position, int64_t n, int64_t most) {
  const HeadCache block = head_block(call, rows, kv_head, position);
  if (!call.packed()) return {block, position % kBlock};
  float* keys = scratch(Slot::unpacked, 2 * most * call.dim);
  float* values = keys + most * call.dim;
  kernels.unpack_keys(static_cast<const char*>(block.keys), call.dim, call.packings.keys, position % kBlock, n, keys);
  kernels.unpack_values(static_cast<const char*>(block.values), call.dim, call.packings.values, position % kBlock, n, values);
  return {{keys, values, call.dim, Type::f32}, 0};
}

}  // namespace headrace
