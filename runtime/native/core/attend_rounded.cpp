// Prefill attention over half-precision K/V, in tiles of queries by blocks of entries (FlashAttention, arXiv:2205.14135), with both
// products in 16-bit integers (isa/attend_rounded.h).
//
// A tile has the queries of all heads of a K/V head, ordered by position, so that invisible entries can be skipped. A block of entries
// is rounded once per tile.
//
// A query has the same bits for any prompt split and thread: blocks and chunks begin at multiples of their size, each chunk has its own
// softmax state, and states are merged in order (merging an empty state changes at most the sign of a zero). A chunk's state is
// merged at once, or stored until those before it are, if there are too few tiles for the threads.
//
// attend.h says when it is taken. Guard: runtime/native/tests/attention.cpp, within the bounds of attention_bounds.h, and packed.cpp.
#include <algorithm>

#include "attend.h"
#include "scratch.h"

namespace headrace {
namespace {

constexpr int64_t kTileRows = 768;      // at most; rounding a block costs as much as 15 rows
constexpr int64_t kManyRows = 256;      // tiles are not made smaller than this if chunks can be parallel tasks instead
constexpr int64_t kFewestRows = 16;     // least per tile, a multiple of all vector widths
constexpr int64_t kFewestLanes = 8;     // of a QueryRows
constexpr int64_t kChunkEntries = 256;  // merging a chunk costs as much as 4 entries
constexpr float kLog2e = 1.44269504f;
static_assert(kTileRows % kMaxRoundedRows == 0 && kMaxRoundedRows % kFewestRows == 0);
static_assert(kChunkEntries % kBlock == 0 && kBlock % kRoundedEntries == 0);

// Split of one sequence: each K/V head's rows (T * heads of the group) into tiles, their visible entries into chunks.
struct Split {
  const AttendCall& call;
  const SequenceRows& sequence;
  int64_t heads, shared, rows;  // K/V heads; query heads of each; rows of each
  int64_t first, chunks;        // first visible chunk; number of them
  int64_t tiles, tile_rows;  // of each K/V head, and the rows of a tile; the last tile may have fewer
  int64_t side = 1;  // chunks of a tile as parallel tasks

  Split(const AttendCall& c, const SequenceRows& s, int64_t threads)
      : call(c), sequence(s), heads(c.kv_heads), shared(c.heads / c.kv_heads), rows(s.count * shared) {
    first = first_seen(c, s.offset) / kChunkEntries;
    chunks = parts(s.offset + s.count, kChunkEntries) - first;
    const auto uneven = [&](int64_t tasks) { return tasks < 4 * threads && tasks % threads != 0; };
    tiles = parts(rows, kTileRows);
    while (uneven(heads * tiles) && (tiles + 1) * kManyRows <= rows) ++tiles;
    // Idle threads get chunks, so that no entry is rounded twice; of a short cache, rows.
    if (uneven(heads * tiles) && chunks > 1) {
      side = std::min(chunks, std::max<int64_t>(2, 8 * threads / (heads * tiles)));
      while (side > 2 && side < chunks && heads * tiles * side % threads != 0) --side;
    }
    while (side == 1 && uneven(heads * tiles) && (tiles + 1) * kFewestRows <= rows) ++tiles;
    const int64_t each = parts(rows, tiles), whole = each < kManyRows ? kFewestRows : kMaxRoundedRows;
    tile_rows = parts(each, whole) * whole;
    tiles = parts(rows, tile_rows);
  }

  static int64_t parts(int64_t whole, int64_t part) { return (whole + part - 1) / part; }
};

// Rows [begin, end) of one K/V head. Row r is token r / shared of the sequence and head r % shared of those that share the K/V head.
struct Tile {
  const Split& split;
  int64_t head, begin, end;

  Tile(const Split& s, int64_t head_index, int64_t index)
      : split(s), head(head_index), begin(index * s.tile_rows), end(std::min(s.rows, begin + s.tile_rows)) {}

  int64_t token(int64_t row) const { return row / split.shared; }
  int64_t query_head(int64_t row) const { return head * split.shared + row % split.shared; }
  int64_t position(int64_t row) const { return split.sequence.offset + token(row); }
};

// A tile's rows in groups of one QueryRows: queries and states.
struct Groups {
  int64_t lanes, dim;
  float* queries;
  float* states;

  // Floats per group.
  int64_t query_floats() const { return lanes * (dim / 2 + 3); }
  int64_t state_floats() const { return lanes * (dim + 2); }

  QueryRows operator[](int64_t index) const {
    QueryRows rows;
    rows.words = queries + index * query_floats();
    rows.scales = rows.words + dim / 2 * lanes;
    rows.positions = rows.scales + lanes;
    rows.firsts = rows.positions + lanes;
    rows.acc = states + index * state_floats();
    rows.top = rows.acc + dim * lanes;
    rows.sum = rows.top + lanes;
    return rows;
  }
};

// Room for a block of rounded entries, in Slot::panel.
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

// Round `count` queries, a tile's rows from `row` on. Lanes beyond them repeat the last one, so that they hold numbers.
void place(const Kernels& kernels, const Tile& tile, const float* q, int64_t row, int64_t count, const QueryRows& to) {
  const AttendCall& call = tile.split.call;
  const float* from[kMaxRoundedRows];
  for (int64_t r = 0; r < kernels.rounded_rows; ++r) {
    const int64_t at = row + std::min(r, count - 1);
    from[r] = q + query_at(call, tile.split.sequence, tile.token(at), tile.query_head(at));
    to.positions[r] = static_cast<float>(tile.position(at));
    to.firsts[r] = static_cast<float>(first_seen(call, tile.position(at)));
  }
  const float factor = call.rule.softcap > 0 ? call.rule.scale : call.rule.scale * kLog2e;
  kernels.round_queries(from, count, call.dim, factor, to);
}

// Queries of a tile with empty states.
void place(const Kernels& kernels, const Tile& tile, const float* q, const Groups& groups) {
  for (int64_t row = tile.begin, g = 0; row < tile.end; row += groups.lanes, ++g) {
    place(kernels, tile, q, row, std::min(groups.lanes, tile.end - row), groups[g]);
  }
}

// Empty states, or with `sink` the heads' sinks.
void begin(const Tile& tile, const Groups& groups, bool sink) {
  const AttendCall& call = tile.split.call;
  for (int64_t row = tile.begin, g = 0; row < tile.end; row += groups.lanes, ++g) {
    const QueryRows rows = groups[g];
    for (int64_t r = 0; r < groups.lanes; ++r) {
      const bool has = sink && row + r < tile.end;
      rows.top[r] = has ? call.sinks[tile.query_head(row + r)] * kLog2e : kLowest;
      rows.sum[r] = has ? 1.0f : 0.0f;
    }
    std::fill(rows.acc, rows.acc + call.dim * groups.lanes, 0.0f);
  }
}

// Attend with a tile's rotated rows to the visible entries of one chunk.
void attend_tile(const Kernels& kernels, const Tile& tile, int64_t chunk, const Groups& groups) {
  const AttendCall& call = tile.split.call;
  const EntryBlock block = entry_block(call.dim);
  const int64_t begin = (tile.split.first + chunk) * kChunkEntries;
  const int64_t end = std::min(begin + kChunkEntries, tile.position(tile.end - 1) + 1);
  int64_t key = std::max(begin, first_met(call, tile.split.sequence, tile.position(tile.begin), kRoundedEntries));
  for (int64_t n = 0; key < end; key += n) {
    n = std::min(kRoundedEntries - key % kRoundedEntries, end - key);
    const Entries entries = entries_at(kernels, call, tile.split.sequence, tile.head, key, n, kRoundedEntries);
    kernels.round_entries(entries.kv, entries.begin, n, block);
    Meeting meetings[kTileRows / kFewestLanes];
    int64_t meets = 0;
    for (int64_t row = tile.begin, g = 0; row < tile.end; row += groups.lanes, ++g) {
      const int64_t count = std::min(groups.lanes, tile.end - row);
      const int64_t from = tile.position(row), to = tile.position(row + count - 1);
      const int64_t here = std::min(n, to + 1 - key);
      if (here <= 0 || key + n <= first_seen(call, from)) continue;
      const bool hides = key + here > from + 1 || first_seen(call, to) > key;
      meetings[meets++] = {groups[g], count, here, hides};
    }
    kernels.attend_rounded(block, key, call.dim, call.rule, meetings, meets);
  }
}

// The output of a group of rows, once all chunks are in it.
void settle(const Kernels& kernels, const Tile& tile, int64_t group, const QueryRows& rows) {
  const AttendCall& call = tile.split.call;
  const int64_t row = tile.begin + group * kernels.rounded_rows;
  const int64_t count = std::min(kernels.rounded_rows, tile.end - row);
  float* out[kMaxRoundedRows];
  for (int64_t r = 0; r < count; ++r) {
    const int64_t token = tile.split.sequence.row + tile.token(row + r);
    out[r] = call.out + (token * call.heads + tile.query_head(row + r)) * call.dim;
  }
  kernels.settle(rows, count, call.dim, out);
  for (int64_t r = 0; r < count; ++r) restore_values(kernels, call, out[r]);
}

}  // namespace

void attend_rounded(Pool& pool, const Kernels& kernels, const AttendCall& call, const SequenceRows& sequence, const float* q) {
  const Split split(call, sequence, pool.threads());
  const int64_t dim = call.dim, lanes = kernels.rounded_rows, side = split.side;
  const int64_t groups = Split::parts(split.tile_rows, lanes), tiles = split.heads * split.tiles;
  const Groups sizes{lanes, dim, nullptr, nullptr};
  const int64_t queries = groups * sizes.query_floats(), state = groups * sizes.state_floats();
  const bool sink = call.sinks != nullptr;
  // Late queries take longest: start with them to balance the threads.
  const auto tile_at = [&](int64_t index) {
    return Tile(split, index % split.heads, split.tiles - 1 - index / split.heads);
  };
  const auto groups_of = [&](const Tile& tile) { return Split::parts(tile.end - tile.begin, lanes); };

  // Enough tiles: a task has a tile and all of its chunks. `all` is the merged state, `next` that of one chunk.
  if (side == 1) {
    pool.run(tiles, [&](Tasks& tasks) {
      while (tasks.next()) {
        const Tile tile = tile_at(tasks.index());
        float* memory = scratch(Slot::tile, queries + 2 * state);
        const Groups all{lanes, dim, memory, memory + queries}, next{lanes, dim, memory, all.states + state};
        const int64_t chunks = Split::parts(tile.position(tile.end - 1) + 1, kChunkEntries) - split.first;
        place(kernels, tile, q, all);
        if (sink) begin(tile, all, true);
        if (sink || chunks > 1) begin(tile, next, false);
        for (int64_t chunk = 0; chunk < chunks; ++chunk) {
          const bool first = chunk == 0 && !sink;
          attend_tile(kernels, tile, chunk, first ? all : next);
          for (int64_t g = 0; !first && g < groups_of(tile); ++g) kernels.merge(all[g], next[g], dim);
        }
        for (int64_t g = 0; g < groups_of(tile); ++g) settle(kernels, tile, g, all[g]);
      }
    });
    return;
  }

  // Few tiles: `side` chunks of each are tasks at once, then merged in order. Per tile: queries, merged state, then chunks' states.
  const int64_t size = queries + (1 + side) * state;
  float* memory = scratch(Slot::states, tiles * size);
  const auto groups_at = [&](int64_t tile, int64_t number) {
    float* its = memory + tile * size;
    return Groups{lanes, dim, its, its + queries + number * state};
  };
  pool.run(tiles, [&](Tasks& tasks) {
    while (tasks.next()) {
      const Tile tile = tile_at(tasks.index());
      place(kernels, tile, q, groups_at(tasks.index(), 0));
      for (int64_t number = 0; number <= side; ++number) begin(tile, groups_at(tasks.index(), number), sink && number == 0);
    }
  });
  for (int64_t chunk = 0; chunk < split.chunks; chunk += side) {
    const int64_t here = std::min(side, split.chunks - chunk);
    pool.run(tiles * here, [&](Tasks& tasks) {
      while (tasks.next()) {
        const int64_t index = tasks.index() / here, at = tasks.index() % here;
        attend_tile(kernels, tile_at(index), chunk + at, groups_at(index, 1 + at));
      }
    });
    pool.run(tiles * groups, [&](Tasks& tasks) {
      while (tasks.next()) {
        const int64_t index = tasks.index() / groups, g = tasks.index() % groups;
        const Tile tile = tile_at(index);
        if (g >= groups_of(tile)) continue;
        const QueryRows rows = groups_at(index, 0)[g];
        for (int64_t at = 0; at < here; ++at) kernels.merge(rows, groups_at(index, 1 + at)[g], dim);
        if (chunk + here == split.chunks) settle(kernels, tile, g, rows);
      }
    });
  }
}

}  // namespace headrace
