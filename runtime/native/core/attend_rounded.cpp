// Attention for many new tokens over K/V in half precision, in tiles of queries by blocks of entries (FlashAttention,
// arXiv:2205.14135), with both products in 16-bit integers: isa/attend_rounded.h.
//
// The queries of a tile are those of all heads that share a K/V head, ordered by position, so that late rows are late
// positions and what nobody sees is left out. A block of entries is rounded once for a whole tile.
#include <algorithm>

#include "attend.h"
#include "scratch.h"

namespace headrace {
namespace {

constexpr int64_t kTileRows = 256;     // at most: rounding a block costs what 15 rows do
constexpr int64_t kFewestRows = 16;    // worth a tile, and a multiple of every vector's lanes
constexpr int64_t kChunkBlocks = 4;  // of entries, at least: a chunk has to be merged
constexpr float kWholeContext = 1e9f;  // a window that nothing leaves
constexpr float kLog2e = 1.44269504f;

// How one call is cut: each K/V head's rows (T * heads of the group) into tiles, the entries they see into chunks.
struct Split {
  const AttendCall& call;
  int64_t heads, shared, rows;    // K/V heads of all sequences; query heads of each; rows of each
  int64_t first;                  // entry that any query sees
  int64_t tiles = 1, chunks = 1;
  int64_t tile_rows, chunk_entries;

  Split(const AttendCall& c, int64_t threads)
      : call(c), heads(c.batch * c.kv_heads), shared(c.heads / c.kv_heads), rows(c.length * shared) {
    first = first_seen(c, c.offset);
    const int64_t blocks = parts(c.offset + c.length - first, kRoundedEntries);
    const auto uneven = [&](int64_t tasks) { return tasks < 4 * threads && tasks % threads != 0; };
    tiles = parts(rows, kTileRows);
    // Threads without a share are given chunks, so that no entry is rounded twice; of a short cache, rows.
    while (uneven(heads * tiles * chunks) && (chunks + 1) * kChunkBlocks <= blocks) ++chunks;
    if (uneven(heads * tiles * chunks)) chunks = 1;
    while (uneven(heads * tiles * chunks) && (tiles + 1) * kFewestRows <= rows) ++tiles;
    tile_rows = parts(parts(rows, tiles), kFewestRows) * kFewestRows;
    tiles = parts(rows, tile_rows);
    chunk_entries = parts(blocks, chunks) * kRoundedEntries;
    chunks = parts(blocks * kRoundedEntries, chunk_entries);
  }

  static int64_t parts(int64_t whole, int64_t part) { return (whole + part - 1) / part; }
};

// Rows [begin, end) of one K/V head of one sequence.
struct Tile {
  const Split& split;
  int64_t head, begin, end;

  Tile(const Split& s, int64_t head_index, int64_t index)
      : split(s), head(head_index), begin(index * s.tile_rows), end(std::min(s.rows, begin + s.tile_rows)) {}

  int64_t sequence() const { return head / split.call.kv_heads; }
  int64_t kv_head() const { return head % split.call.kv_heads; }
  int64_t token(int64_t row) const { return row / split.shared; }
  int64_t query_head(int64_t row) const { return kv_head() * split.shared + row % split.shared; }
  int64_t position(int64_t row) const { return split.call.offset + token(row); }
};

// The states of a tile's rows, in groups of as many as a QueryRows has lanes.
struct Groups {
  int64_t lanes, dim;
  float* memory;

  static int64_t size(const Kernels& kernels, int64_t rows, int64_t dim) {
    return Split::parts(rows, kernels.rounded_rows) * kernels.rounded_rows * (dim / 2 + dim + 4);
  }

  QueryRows operator[](int64_t index) const {
    QueryRows rows;
    rows.words = memory + index * lanes * (dim / 2 + dim + 4);
    rows.acc = rows.words + dim / 2 * lanes;
    rows.scales = rows.acc + dim * lanes;
    rows.top = rows.scales + lanes;
    rows.sum = rows.top + lanes;
    rows.positions = rows.sum + lanes;
    return rows;
  }
};

EntryBlock entry_block(int64_t dim) {
  const int64_t half = Split::parts(dim / 2, 16) * 16;
  EntryBlock block;
  block.keys = scratch(Slot::panel, kRoundedEntries * (half + dim / 2 + 3));
  block.values = block.keys + kRoundedEntries * half;
  block.key_scales = block.values + kRoundedEntries / 2 * dim;
  block.value_exponents = block.key_scales + kRoundedEntries;
  block.value_shares = block.value_exponents + kRoundedEntries;
  return block;
}

void place(const Kernels& kernels, const Tile& tile, const float* q, int64_t row, int64_t count, const QueryRows& to) {
  const AttendCall& call = tile.split.call;
  const float* from[kMaxRoundedRows];
  for (int64_t r = 0; r < kernels.rounded_rows; ++r) {
    const int64_t at = row + std::min(r, count - 1);
    from[r] = q + ((tile.sequence() * call.heads + tile.query_head(at)) * call.length + tile.token(at)) * call.dim;
    to.positions[r] = static_cast<float>(tile.position(at));
  }
  const float factor = call.rule.softcap > 0 ? call.rule.scale : call.rule.scale * kLog2e;
  kernels.round_queries(from, count, call.dim, factor, to);
}

// A tile's rows attend to the entries of one chunk that they see.
void attend_tile(const Kernels& kernels, const Tile& tile, int64_t chunk, const float* q, const Groups& groups) {
  const AttendCall& call = tile.split.call;
  const HeadCache kv = head_cache(call, tile.sequence(), tile.kv_head());
  const EntryBlock block = entry_block(call.dim);
  const float window = call.window > 0 ? static_cast<float>(call.window) : kWholeContext;
  const auto for_groups = [&](auto&& body) {
    for (int64_t row = tile.begin, g = 0; row < tile.end; row += groups.lanes, ++g) {
      body(row, std::min(groups.lanes, tile.end - row), groups[g]);
    }
  };
  for_groups([&](int64_t row, int64_t count, const QueryRows& rows) {
    place(kernels, tile, q, row, count, rows);
    if (call.sinks == nullptr || chunk != 0) return;  // they count once
    for (int64_t r = 0; r < count; ++r) {
      rows.top[r] = call.sinks[tile.query_head(row + r)] * kLog2e;
      rows.sum[r] = 1.0f;
    }
  });
  const int64_t begin = tile.split.first + chunk * tile.split.chunk_entries;
  const int64_t end = std::min(begin + tile.split.chunk_entries, tile.position(tile.end - 1) + 1);
  const int64_t skipped = std::max<int64_t>(0, first_seen(call, tile.position(tile.begin)) - begin);
  for (int64_t key = begin + skipped; key < end; key += kRoundedEntries) {
    const int64_t n = std::min(kRoundedEntries, end - key);
    kernels.round_entries(kv, key, n, block);
    for_groups([&](int64_t row, int64_t count, const QueryRows& rows) {
      const int64_t from = tile.position(row), to = tile.position(row + count - 1);
      const int64_t here = std::min(n, to + 1 - key);
      if (here <= 0 || key + n <= first_seen(call, from)) return;
      const bool hides = key + here > from + 1 || first_seen(call, to) > key;
      kernels.attend_rounded(block, key, here, call.dim, call.rule, window, hides, rows, count);
    });
  }
}

// The output of a group of rows, once all chunks are in the first one's.
void settle(const Kernels& kernels, const Tile& tile, int64_t group, const QueryRows& rows) {
  const AttendCall& call = tile.split.call;
  const int64_t row = tile.begin + group * kernels.rounded_rows;
  const int64_t count = std::min(kernels.rounded_rows, tile.end - row);
  float* out[kMaxRoundedRows];
  for (int64_t r = 0; r < count; ++r) {
    const int64_t token = tile.sequence() * call.length + tile.token(row + r);
    out[r] = call.out + (token * call.heads + tile.query_head(row + r)) * call.dim;
  }
  kernels.settle(rows, count, call.dim, out);
}

}  // namespace

void attend_rounded(Pool& pool, const Kernels& kernels, const AttendCall& call, const float* q) {
  const Split split(call, pool.threads());
  const int64_t size = Groups::size(kernels, split.tile_rows, call.dim);
  const int64_t groups = Split::parts(split.tile_rows, kernels.rounded_rows);
  const bool alone = split.chunks == 1;
  float* shared = alone ? nullptr : scratch(Slot::states, split.heads * split.tiles * split.chunks * size);
  // Tiles, then heads, then chunks. Late queries see the most: start with them, so that the threads end together.
  const auto tile_at = [&](int64_t index) {
    return Tile(split, index % split.heads, split.tiles - 1 - index / split.heads);
  };
  const auto groups_at = [&](int64_t task) { return Groups{kernels.rounded_rows, call.dim, shared + task * size}; };
  pool.run(split.heads * split.tiles * split.chunks, [&](Tasks& tasks) {
    while (tasks.next()) {
      const Tile tile = tile_at(tasks.index() / split.chunks);
      if (!alone) {
        attend_tile(kernels, tile, tasks.index() % split.chunks, q, groups_at(tasks.index()));
        continue;
      }
      const Groups own{kernels.rounded_rows, call.dim, scratch(Slot::tile, size)};
      attend_tile(kernels, tile, 0, q, own);
      for (int64_t g = 0; tile.begin + g * own.lanes < tile.end; ++g) settle(kernels, tile, g, own[g]);
    }
  });
  if (alone) return;
  pool.run(split.heads * split.tiles * groups, [&](Tasks& tasks) {
    while (tasks.next()) {
      const int64_t index = tasks.index() / groups, group = tasks.index() % groups;
      const Tile tile = tile_at(index);
      if (tile.begin + group * kernels.rounded_rows >= tile.end) continue;
      const QueryRows rows = groups_at(index * split.chunks)[group];
      for (int64_t i = 1; i < split.chunks; ++i) {
        kernels.merge(rows, groups_at(index * split.chunks + i)[group], call.dim);
      }
      settle(kernels, tile, group, rows);
    }
  });
}

}  // namespace headrace
