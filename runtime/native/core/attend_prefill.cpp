// Prefill attention in float32 (integers: attend_rounded.cpp), in tiles whose scores stay in the cache (FlashAttention,
// arXiv:2205.14135). Both products use GEMM panels (isa/gemm.h).
//
// For float32 K/V, for kernels that do not round attention, and for masks (attend.h). Guard: runtime/native/tests/attention.cpp;
// masks: tests/runtime/ops/test_native_recurrent.py.
#include <algorithm>
#include <cstring>
#include <limits>
#include <tuple>
#include <utility>

#include "attend.h"
#include "scratch.h"

namespace headrace {
namespace {

constexpr int64_t kQueries = 48;  // positions per tile; every head of a group takes part
constexpr int64_t kKeys = 64;     // a multiple of every panel width
static_assert(kBlock % kKeys == 0);

// Working memory of one tile of (query heads per kv head) * kQueries rows.
struct Tile {
  int64_t rows, panel, dim, dim_padded;
  float* key_panel;    // (kPanelDepth, panel) of one block
  float* value_panel;  // (kKeys, panel)
  float* scores;       // (rows, kKeys)
  float* out;          // (dim_padded / panel, rows, panel)
  Softmax* states;     // (rows)
  float* factors;      // (rows)

  Tile(const Kernels& kernels, int64_t tile_rows, int64_t head_dim)
      : rows(tile_rows), panel(kernels.panel), dim(head_dim) {
    dim_padded = (dim + panel - 1) / panel * panel;
    key_panel = scratch(Slot::panel, (kPanelDepth + kKeys) * panel);
    value_panel = key_panel + kPanelDepth * panel;
    scores = scratch(Slot::scores, rows * kKeys);
    out = scratch(Slot::tile, rows * dim_padded);
    float* rest = scratch(Slot::states, rows * 8);
    states = reinterpret_cast<Softmax*>(rest);
    factors = rest + rows * 4;
  }
};

// scores (heads * queries, kKeys) of q rows against rows [key, key + n) of kv's keys. q (heads, queries, D): a head's rows are contiguous,
// heads `q_stride` floats apart.
void score(const Kernels& kernels, const Tile& tile, const HeadCache& kv, const float* q, int64_t q_stride,
           int64_t heads, int64_t queries, int64_t key, int64_t n) {
  Matrix keys;  // stored keys as a plain weight matrix
  keys.data = kv.keys;
  keys.n = key + n;
  keys.k = tile.dim;
  keys.type = kv.type;
  for (int64_t column = 0; column < kKeys; column += tile.panel) {
    const int64_t here = std::clamp<int64_t>(n - column, 0, tile.panel);
    for (int64_t d = 0; d < tile.dim && here > 0; d += kPanelDepth) {
      const int64_t depth = std::min(kPanelDepth, tile.dim - d);
      std::memset(tile.key_panel, 0, static_cast<size_t>(depth * tile.panel) * sizeof(float));
      kernels.unpack_panel(keys, key + column, here, d, depth, 0, tile.key_panel);
      for (int64_t h = 0; h < heads; ++h) {
        kernels.gemm(q + h * q_stride + d, tile.dim, tile.key_panel, tile.scores + h * queries * kKeys + column,
                     kKeys, queries, depth, d != 0);
      }
    }
  }
}

// out += scores @ rows [key, key + n) of kv's values, for all rows; columns beyond D are zeros.
void weigh(const Kernels& kernels, const Tile& tile, const HeadCache& kv, int64_t rows, int64_t key, int64_t n) {
  for (int64_t d = 0; d < tile.dim_padded; d += tile.panel) {
    const int64_t width = std::min(tile.panel, tile.dim - d);
    if (width < tile.panel) {
      std::memset(tile.value_panel, 0, static_cast<size_t>(kKeys * tile.panel) * sizeof(float));
    }
    for (int64_t i = 0; i < n; ++i) {
      const char* row = static_cast<const char*>(kv.values) + ((key + i) * tile.dim + d) * size_of(kv.type);
      kernels.to_float(row, kv.type, width, tile.value_panel + i * tile.panel);
    }
    kernels.gemm(tile.scores, kKeys, tile.value_panel, tile.out + d * tile.rows, tile.panel, rows, n, true);
  }
}

// The range [lo, hi) within entries [key, key + n), from 0, that row `t` sees under a mask; its scores (n) of hidden ones become -inf.
std::pair<int64_t, int64_t> seen(const SequenceRows& sequence, int64_t t, int64_t key, int64_t n, float* scores) {
  const uint8_t* visible = sequence.visible + t * (sequence.offset + sequence.count) + key;
  int64_t lo = 0, hi = n;
  while (lo < hi && visible[lo] == 0) ++lo;
  while (hi > lo && visible[hi - 1] == 0) --hi;
  for (int64_t i = lo; i < hi; ++i) {
    if (visible[i] == 0) scores[i] = -std::numeric_limits<float>::infinity();
  }
  return {lo, hi};
}

// Up to kQueries rows of a sequence, from its row t0 on, by all query heads of a K/V head. Row r of the tile is head r / queries of those
// and row t0 + r % queries of the sequence.
void attend_tile(const Kernels& kernels, const AttendCall& call, const SequenceRows& sequence, const float* q, int64_t kv_head,
                 int64_t t0) {
  const int64_t shared = call.heads / call.kv_heads;
  const int64_t queries = std::min(kQueries, sequence.count - t0);
  const int64_t rows = shared * queries;
  const Tile tile(kernels, rows, call.dim);
  const float* first = q + query_at(call, sequence, t0, kv_head * shared);

  std::memset(tile.out, 0, static_cast<size_t>(rows * tile.dim_padded) * sizeof(float));
  for (int64_t r = 0; r < rows; ++r) tile.states[r] = first_state(call, kv_head * shared + r / queries, nullptr);

  const int64_t position = sequence.offset + t0;
  const int64_t last = sequence.visible == nullptr ? position + queries : sequence.offset + sequence.count;  // one past the last entry
  for (int64_t key = first_met(call, sequence, position, kKeys), n = 0; key < last; key += n) {
    n = std::min(kKeys - key % kKeys, last - key);
    const Entries entries = entries_at(kernels, call, sequence, kv_head, key, n, kKeys);
    score(kernels, tile, entries.kv, first, sequence.count * call.dim, shared, queries, entries.begin, n);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t own = position + r % queries;
      int64_t lo = std::clamp<int64_t>(first_seen(call, own) - key, 0, n);
      int64_t hi = std::clamp<int64_t>(own + 1 - key, 0, n);
      if (sequence.visible != nullptr) {
        std::tie(lo, hi) = seen(sequence, t0 + r % queries, key, n, tile.scores + r * kKeys);
      }
      const float factor =
          kernels.softmax_row(tile.scores + r * kKeys, kKeys, lo, hi, call.rule, &tile.states[r]);
      if (factor == 1.0f) continue;  // the maximum stays, and with it the sums so far
      for (int64_t d = 0; d < tile.dim_padded; d += tile.panel) {
        kernels.rescale(tile.out + d * tile.rows + r * tile.panel, factor, tile.panel);
      }
    }
    weigh(kernels, tile, entries.kv, rows, entries.begin, n);
  }

  // Divide by the sums; panels of columns become rows of the result.
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t head = kv_head * shared + r / queries, t = t0 + r % queries;
    float* out = call.out + ((sequence.row + t) * call.heads + head) * call.dim;
    for (int64_t d = 0; d < call.dim; ++d) {
      out[d] = tile.out[d / tile.panel * tile.panel * tile.rows + r * tile.panel + d % tile.panel] /
               tile.states[r].sum;
    }
    restore_values(kernels, call, out);
  }
}

}  // namespace

void attend_prefill(Pool& pool, const Kernels& kernels, const AttendCall& call, const SequenceRows& rows, const float* q) {
  const int64_t blocks = (rows.count + kQueries - 1) / kQueries;
  pool.run(call.kv_heads * blocks, [&](Tasks& tasks) {
    while (tasks.next()) {
      // Late queries take longest: start with them to balance the threads.
      const int64_t block = blocks - 1 - tasks.index() / call.kv_heads;
      attend_tile(kernels, call, rows, q, tasks.index() % call.kv_heads, block * kQueries);
    }
  });
}

}  // namespace headrace
