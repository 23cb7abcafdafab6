// Attention for many new tokens over K/V in half precision, in tiles of queries by blocks of entries (FlashAttention,
// arXiv:2205.14135), with both products in 16-bit integers: isa/attend_rounded.h.
//
// The queries of a tile are those of all heads that share a K/V head, ordered by position, so that late rows are late
// positions and what nobody sees is left out. A block of entries is rounded once for a whole tile.
#include <algorithm>
#include <cmath>

#include "attend.h"
#include "scratch.h"

namespace headrace {
namespace {

constexpr int64_t kTileRows = 256;      // at most: rounding a block costs what 15 rows do
constexpr float kWholeContext = 1e9f;   // a window that nothing leaves

// A stretch of the rows (T * heads of the group) that one K/V head serves.
struct Tile {
  const AttendCall& call;
  int64_t b, kv_head, begin, end;

  int64_t shared() const { return call.heads / call.kv_heads; }
  int64_t token(int64_t row) const { return row / shared(); }
  int64_t head(int64_t row) const { return kv_head * shared() + row % shared(); }
  int64_t position(int64_t row) const { return call.offset + token(row); }
};

// The working memory of one tile: its queries in groups, and a block of entries.
struct Memory {
  int64_t lanes, dim;
  float* groups;
  EntryBlock block;

  Memory(const Kernels& kernels, int64_t rows, int64_t head_dim) : lanes(kernels.rounded_rows), dim(head_dim) {
    const int64_t half = (dim / 2 + 15) / 16 * 16;
    groups = scratch(Slot::tile, (rows + lanes - 1) / lanes * size());
    float* at = scratch(Slot::panel, kRoundedEntries * (half + dim / 2 + 3));
    block.keys = at;
    block.values = at + kRoundedEntries * half;
    block.key_scales = block.values + kRoundedEntries / 2 * dim;
    block.value_exponents = block.key_scales + kRoundedEntries;
    block.value_shares = block.value_exponents + kRoundedEntries;
  }

  int64_t size() const { return (dim / 2 + dim + 4) * lanes; }

  QueryRows group(int64_t index) const {
    QueryRows rows;
    rows.words = groups + index * size();
    rows.acc = rows.words + dim / 2 * lanes;
    rows.scales = rows.acc + dim * lanes;
    rows.top = rows.scales + lanes;
    rows.sum = rows.top + lanes;
    rows.positions = rows.sum + lanes;
    return rows;
  }
};

void attend_tile(const Kernels& kernels, const Tile& tile, const float* q) {
  const AttendCall& call = tile.call;
  const Memory memory(kernels, tile.end - tile.begin, call.dim);
  const int64_t lanes = memory.lanes, groups = (tile.end - tile.begin + lanes - 1) / lanes;
  const HeadCache kv = head_cache(call, tile.b, tile.kv_head);
  const float window = call.window > 0 ? static_cast<float>(call.window) : kWholeContext;
  const float factor = call.rule.softcap > 0 ? call.rule.scale : call.rule.scale * 1.44269504f;  // powers of two, if not bent
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t row = tile.begin + g * lanes, count = std::min(lanes, tile.end - row);
    const QueryRows rows = memory.group(g);
    const float* from[kMaxRoundedRows];
    for (int64_t r = 0; r < lanes; ++r) {
      const int64_t at = row + std::min(r, count - 1);
      from[r] = q + ((tile.b * call.heads + tile.head(at)) * call.length + tile.token(at)) * call.dim;
      rows.positions[r] = static_cast<float>(tile.position(at));
    }
    kernels.round_queries(from, count, call.dim, factor, rows);
  }
  const int64_t last = tile.position(tile.end - 1) + 1;
  for (int64_t key = first_seen(call, tile.position(tile.begin)); key < last; key += kRoundedEntries) {
    const int64_t n = std::min(kRoundedEntries, last - key);
    kernels.round_entries(kv, key, n, memory.block);
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t row = tile.begin + g * lanes, count = std::min(lanes, tile.end - row);
      const int64_t from = tile.position(row), to = tile.position(row + count - 1);
      const int64_t here = std::min(n, to + 1 - key);
      if (here <= 0 || key + n <= first_seen(call, from)) continue;
      const bool hides = key + here > from + 1 || first_seen(call, to) > key;
      kernels.attend_rounded(memory.block, key, here, call.dim, call.rule, window, hides, memory.group(g), count);
    }
  }
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t row = tile.begin + g * lanes, count = std::min(lanes, tile.end - row);
    float* out[kMaxRoundedRows];
    for (int64_t r = 0; r < count; ++r) {
      out[r] = call.out + ((tile.b * call.length + tile.token(row + r)) * call.heads + tile.head(row + r)) * call.dim;
    }
    kernels.settle(memory.group(g), count, call.dim, out);
  }
}

// Into how many tiles the rows of a K/V head are cut: as few as memory allows, but so that no thread is left without.
int64_t tiles_of(int64_t rows, int64_t heads, int64_t threads) {
  int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  while (heads * tiles < 4 * threads && heads * tiles % threads != 0 && tiles * 2 * 16 <= rows) ++tiles;
  return tiles;
}

}  // namespace

void attend_rounded(Pool& pool, const Kernels& kernels, const AttendCall& call, const float* q) {
  const int64_t rows = call.length * (call.heads / call.kv_heads), heads = call.batch * call.kv_heads;
  const int64_t tiles = tiles_of(rows, heads, pool.threads());
  const int64_t step = ((rows + tiles - 1) / tiles + 15) / 16 * 16;  // whole vectors
  const int64_t filled = (rows + step - 1) / step;
  pool.run(heads * filled, [&](Tasks& tasks) {
    while (tasks.next()) {
      // Late queries see the most: start with them, so that the threads end together.
      const int64_t begin = (filled - 1 - tasks.index() / heads) * step, head = tasks.index() % heads;
      const Tile tile{call, head / call.kv_heads, head % call.kv_heads, begin, std::min(rows, begin + step)};
      attend_tile(kernels, tile, q);
    }
  });
}

}  // namespace headrace
