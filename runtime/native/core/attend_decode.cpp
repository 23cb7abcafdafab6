// Attention of decode rows (attend.h). Query heads of one K/V head, and rows of a sequence that see the same entries, share a read of the
// cache.
//
// Positions are split into chunks of a block, each with a softmax state; a query's states are joined in order at the end (flash
// decoding, arXiv:2307.08691), so its bits do not depend on the split. Tasks go over sequences, K/V heads, chunks and sets of rows, in
// this order, so that all rows of a sequence find a chunk in the cache. A thread prefetches the next chunk, of whichever head and
// sequence, while it works on one.
//
// Guard: runtime/native/tests/attention.cpp and packed.cpp, also that bits do not depend on threads and company.
#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "attend.h"
#include "scratch.h"

namespace headrace {
namespace {

constexpr int64_t kAloneProducts = 1 << 15;  // multiply-adds below which the caller works alone

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// One sequence of a call. Tasks are numbered by K/V head, chunk, set of rows, part of the K/V head's queries; the last changes fastest.
// The ..._before count those of all sequences before this one.
struct Portion {
  const SequenceRows& rows;
  int64_t first;   // first visible chunk
  int64_t chunks;  // number of visible chunks
  int64_t sets = 0;
  int64_t tasks_before = 0, chunks_before = 0;  // chunks of all K/V heads
  int64_t queries_before = 0, states_before = 0;  // indices of states, see below
};

// Distribution of the decode rows of all sequences.
struct Split {
  int64_t shared, parts, part;  // query heads per K/V head; parts, and heads per part
  int64_t together;             // rows of a set
  int64_t sinks;                // states of a query before its chunks: 1 with sinks, else 0
  int64_t tasks = 0, chunks = 0, queries = 0, all_states = 0, products = 0;  // totals over all sequences
  std::vector<Portion> portions;

  // most: queries per kernel call.
  Split(const AttendCall& call, int64_t most)
      : shared(call.heads / call.kv_heads), sinks(call.sinks != nullptr ? 1 : 0) {
    parts = ceil_div(shared, most);
    part = ceil_div(shared, parts);
    together = std::max<int64_t>(1, most / shared);
    for (int64_t i = 0; i < call.count; ++i) {
      const SequenceRows& rows = call.sequences[i];
      if (rows.phase != Phase::decode || rows.count == 0 || rows.row >= call.wanted) continue;
      const int64_t first = first_seen(call, rows.offset) / kAttendChunk, end = rows.offset + rows.count;
      portions.push_back({rows, first, ceil_div(end, kAttendChunk) - first});
      portions.back().sets = ceil_div(rows.count, together);
    }
    for (Portion& portion : portions) {
      portion.tasks_before = tasks;
      portion.chunks_before = chunks;
      portion.queries_before = queries;
      portion.states_before = all_states;
      const int64_t count = portion.rows.count * call.heads, end = portion.rows.offset + portion.rows.count;
      chunks += call.kv_heads * portion.chunks;
      tasks += call.kv_heads * portion.chunks * portion.sets * parts;
      queries += count;
      all_states += count * states(portion);
      products += count * std::min(portion.chunks * kAttendChunk, end) * call.dim;
    }
  }

  // States of one query: its head's sink, if any, then its chunks.
  int64_t states(const Portion& portion) const { return sinks + portion.chunks; }

  // The sequence of a task or query, by linear search: calls have few sequences, and a thread's tasks are adjacent.
  template <int64_t Portion::*Before>
  const Portion& portion_of(int64_t index) const {
    return *std::prev(std::upper_bound(portions.begin(), portions.end(), index,
                                       [](int64_t at, const Portion& portion) { return at < portion.*Before; }));
  }
};

// A thread's prefetch. Chunks are numbered over all sequences and K/V heads. `at` is the chunk that is read (-2: none yet), those before
// `until` are prefetched or read, and `credit` entries were read for which none were prefetched.
struct Ahead {
  int64_t at = -2, until = 0, credit = 0;

  // Begin to read a chunk. False if it was not prefetched: the first one, or another thread's.
  bool begin(int64_t chunk) {
    const bool follows = chunk == at || (chunk == at + 1 && chunk < until);
    at = chunk;
    if (!follows) until = chunk + 1, credit = 0;
    return follows;
  }
};

}  // namespace

void attend_decode(Pool& pool, const Kernels& kernels, const AttendCall& call, const float* q) {
  const Split split(call, call.packed() ? kPackedQueries : kMaxQueries);
  if (split.tasks == 0) return;
  const int64_t dim = call.dim, row_bytes = dim * size_of(call.kv_type);
  // For each (sequence, query, state), in this order: accumulators (dim), then, behind all of them, states. A query is a row and a head.
  float* accumulators = scratch(Slot::states, split.all_states * (dim + 4));
  auto* states = reinterpret_cast<Softmax*>(accumulators + split.all_states * dim);
  static_assert(sizeof(Softmax) <= 4 * sizeof(float));

  // Positions [first, end) of the entries of chunk `number` that row `t` sees. `number` counts from the sequence's first visible chunk.
  const auto entries_of = [&](const Portion& portion, int64_t t, int64_t number) {
    const int64_t from = (portion.first + number) * kAttendChunk, position = portion.rows.offset + t;
    const int64_t end = std::min(position + 1, from + kAttendChunk);
    return std::pair(std::min(std::max(first_seen(call, position), from), end), end);
  };
  // Chunk `number` of a head as row `t` sees it; n = 0 and no memory if it sees none. Plain entries begin at the first visible one, packed
  // ones with the block.
  const auto chunk_of = [&](const Portion& portion, int64_t kv_head, int64_t t, int64_t number) {
    const int64_t from = (portion.first + number) * kAttendChunk;
    const auto [first, end] = entries_of(portion, t, number);
    Chunk chunk{nullptr, nullptr, end - first, first - from, {}, {}};
    if (chunk.n <= 0) return chunk;
    const HeadCache cache = head_block(call, portion.rows, kv_head, from);
    const int64_t skipped = call.packed() ? 0 : chunk.first * row_bytes;
    chunk.keys = static_cast<const char*>(cache.keys) + skipped;
    chunk.values = static_cast<const char*>(cache.values) + skipped;
    chunk.own = {chunk.keys, chunk.values, chunk.n * row_bytes};
    // A head's packed block is one piece, keys before values: both halves of it, or nothing for few entries.
    if (call.packed()) chunk.own = {chunk.keys, chunk.keys + call.head_bytes / 2, chunk.n < kAttendChunk / 2 ? 0 : call.head_bytes / 2};
    return chunk;
  };
  // Set chunk.next, the memory to prefetch while a chunk is read: about as many entries as it has, so that the distance stays a chunk where
  // some are short. A chunk is taken once half of its entries are in credit, two chunks at most.
  const auto plan = [&](Ahead& ahead, Chunk& chunk) {
    ahead.credit = std::min(ahead.credit + chunk.n, kAttendChunk);
    for (Places& places : chunk.next) {
      if (ahead.until >= split.chunks) return;
      const Portion& portion = split.portion_of<&Portion::chunks_before>(ahead.until);
      const int64_t index = ahead.until - portion.chunks_before;
      const Chunk later = chunk_of(portion, index / portion.chunks, 0, index % portion.chunks);
      if (ahead.credit * 2 < later.n) return;
      ahead.credit -= later.n;
      ahead.until += 1;
      places = later.own;
    }
  };
  // Rows [t, t + count), by the query heads of a part, over a chunk of which they see the same entries. last: the final read of the chunk,
  // which prefetches the next one. Query j is row t + j / heads and head `head` + j % heads.
  const auto attend = [&](const Portion& portion, int64_t kv_head, int64_t part, int64_t number, int64_t t, int64_t count, bool last,
                          Ahead& ahead) {
    const SequenceRows& rows = portion.rows;
    const int64_t head = kv_head * split.shared + part * split.part;
    const int64_t heads = std::min(split.part, (kv_head + 1) * split.shared - head), queries = count * heads;
    const float* asked[kMaxQueries];
    Softmax found[kMaxQueries];
    const auto state = [&](int64_t j) {  // index of query j's state for this chunk
      const int64_t query = (t + j / heads) * call.heads + head + j % heads;
      return portion.states_before + query * split.states(portion) + split.sinks + number;
    };
    for (int64_t j = 0; j < queries; ++j) {
      asked[j] = q + query_at(call, rows, t + j / heads, head + j % heads);
      found[j] = {-std::numeric_limits<float>::infinity(), 0.0f, accumulators + state(j) * dim};
    }
    Chunk chunk = chunk_of(portion, kv_head, t, number);
    // A chunk that was prefetched is not requested again.
    if (ahead.begin(portion.chunks_before + kv_head * portion.chunks + number)) chunk.own = {};
    if (last) plan(ahead, chunk);
    if (chunk.n <= 0) {  // the rows see nothing of the chunk: empty states, which have no weight when states are joined
      for (int64_t j = 0; j < queries; ++j) std::fill(found[j].acc, found[j].acc + dim, 0.0f);
    } else if (call.packed()) {
      float* scores = scratch(Slot::scores, queries * kAttendChunk + packed_scratch(queries, dim));
      kernels.attend_packed(chunk, call.packings, dim, asked, queries, call.rule, scores, found);
    } else {
      float* scores = scratch(Slot::scores, queries * kAttendChunk);
      kernels.attend_chunk(chunk, call.kv_type, dim, asked, queries, call.rule, scores, found);
    }
    for (int64_t j = 0; j < queries; ++j) states[state(j)] = found[j];
  };
  // Task `index` of the region, taken apart in the order of Portion.
  const auto task = [&](int64_t index, Ahead& ahead) {
    const Portion& portion = split.portion_of<&Portion::tasks_before>(index);
    index -= portion.tasks_before;
    const int64_t part = index % split.parts;
    index /= split.parts;
    const int64_t t = index % portion.sets * split.together, count = std::min(split.together, portion.rows.count - t);
    index /= portion.sets;
    const int64_t number = index % portion.chunks, kv_head = index / portion.chunks;
    const bool last = t + count == portion.rows.count && part + 1 == split.parts;
    // Visible entries of middle rows are between those of the first and the last.
    if (entries_of(portion, t, number) == entries_of(portion, t + count - 1, number)) {
      return attend(portion, kv_head, part, number, t, count, last, ahead);
    }
    for (int64_t i = 0; i < count; ++i) attend(portion, kv_head, part, number, t + i, 1, last && i + 1 == count, ahead);
  };

  // First all chunks, each to its own states; then each query's states are joined.
  pool.run(
      split.tasks,
      [&](Tasks& tasks) {
        Ahead ahead;
        while (tasks.next()) task(tasks.index(), ahead);
      },
      split.products * 2 > kAloneProducts);
  pool.run(
      split.queries,
      [&](Tasks& tasks) {
        while (tasks.next()) {
          const Portion& portion = split.portion_of<&Portion::queries_before>(tasks.index());
          const int64_t number = tasks.index() - portion.queries_before;  // row of the sequence * heads + head
          const int64_t at = portion.states_before + number * split.states(portion);
          if (split.sinks != 0) {
            float* acc = accumulators + at * dim;
            std::fill(acc, acc + dim, 0.0f);
            states[at] = first_state(call, number % call.heads, acc);
          }
          const int64_t row = portion.rows.row * call.heads + number;
          kernels.join_states(states + at, split.states(portion), dim, call.out + row * dim);
          restore_values(kernels, call, call.out + row * dim);
        }
      },
      split.all_states * dim > kAloneProducts);
}

}  // namespace headrace
