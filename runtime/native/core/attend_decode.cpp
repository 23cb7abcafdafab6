// Attention of decode rows. Query heads of one K/V head, and rows of a sequence that see the same entries, share a read of the cache.
//
// Positions are split into chunks of a block, each with a softmax state; a query's states are joined in order at the end (flash
// decoding, arXiv:2307.08691), so its bits do not depend on the split. Tasks go over sequences, K/V heads, groups of chunks and sets
// of rows, in this order, so that all rows of a sequence find a chunk in the cache. The chunks of a group are read side by side: one
// stream does not reach full memory bandwidth.
#include <algorithm>
#include <utility>
#include <vector>

#include "attend.h"
#include "scratch.h"

namespace headrace {
namespace {

constexpr int64_t kMostSide = 2;             // most chunks read side by side
constexpr int64_t kTasksPerThread = 4;       // least, else groups are smaller
constexpr int64_t kAloneProducts = 1 << 15;  // multiply-adds below which the caller works alone

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// One sequence of a call. Tasks are numbered by K/V head, group of chunks, set of rows, part of the K/V head's queries.
struct Portion {
  const SequenceRows& rows;
  int64_t first;   // first visible chunk
  int64_t chunks;  // number of visible chunks
  int64_t groups = 0, sets = 0;
  int64_t tasks_before = 0;
  int64_t queries_before = 0, states_before = 0;  // indices of states, see below
};

// Distribution of the decode rows of all sequences.
struct Split {
  int64_t shared, parts, part;  // query heads per K/V head; parts, and heads per part
  int64_t together;             // rows of a set
  int64_t side;                 // chunks of a group
  int64_t sinks;
  int64_t tasks = 0, queries = 0, all_states = 0, products = 0;
  std::vector<Portion> portions;

  // most: queries per kernel call.
  Split(const AttendCall& call, int64_t most, int threads)
      : shared(call.heads / call.kv_heads), sinks(call.sinks != nullptr ? 1 : 0) {
    parts = ceil_div(shared, most);
    part = ceil_div(shared, parts);
    together = std::max<int64_t>(1, most / shared);
    int64_t chunks = 0;
    for (int64_t i = 0; i < call.count; ++i) {
      const SequenceRows& rows = call.sequences[i];
      if (rows.phase != Phase::decode || rows.count == 0 || rows.row >= call.wanted) continue;
      const int64_t first = first_seen(call, rows.offset) / kAttendChunk, end = rows.offset + rows.count;
      portions.push_back({rows, first, ceil_div(end, kAttendChunk) - first});
      portions.back().sets = ceil_div(rows.count, together);
      chunks += portions.back().sets * portions.back().chunks;
    }
    side = std::clamp<int64_t>(call.kv_heads * parts * chunks / (kTasksPerThread * threads), 1, kMostSide);
    for (Portion& portion : portions) {
      portion.groups = ceil_div(portion.chunks, side);
      portion.tasks_before = tasks;
      portion.queries_before = queries;
      portion.states_before = all_states;
      const int64_t count = portion.rows.count * call.heads, end = portion.rows.offset + portion.rows.count;
      tasks += call.kv_heads * portion.groups * portion.sets * parts;
      queries += count;
      all_states += count * states(portion);
      products += count * std::min(portion.chunks * kAttendChunk, end) * call.dim;
    }
  }

  // Keys to prefetch after a group, whose next chunk would be `chunk`: of this head, or the `side`-th chunk of the next head or
  // sequence, since short sequences end before a prefetch arrives.
  const char* next_keys(const AttendCall& call, const Portion& portion, int64_t kv_head, int64_t chunk, int64_t at) const {
    const Portion* whose = &portion;
    if (chunk >= portion.chunks) {
      chunk = at;
      if (++kv_head == call.kv_heads) {
        kv_head = 0;
        if (++whose == portions.data() + portions.size()) return nullptr;
      }
      if (chunk >= whose->chunks) return nullptr;
    }
    return static_cast<const char*>(head_block(call, whose->rows, kv_head, (whose->first + chunk) * kAttendChunk).keys);
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

}  // namespace

void attend_decode(Pool& pool, const Kernels& kernels, const AttendCall& call, const float* q) {
  const Split split(call, call.packed() ? kPackedQueries : kMaxQueries, pool.threads());
  if (split.tasks == 0) return;
  const int64_t dim = call.dim, row_bytes = dim * size_of(call.kv_type);
  // (sequence, query, state): accumulators, then states.
  float* accumulators = scratch(Slot::states, split.all_states * (dim + 4));
  auto* states = reinterpret_cast<Softmax*>(accumulators + split.all_states * dim);
  static_assert(sizeof(Softmax) <= 4 * sizeof(float));

  // Entries of chunk `number` that row `t` sees.
  const auto entries_of = [&](const Portion& portion, int64_t t, int64_t number) {
    const int64_t from = (portion.first + number) * kAttendChunk, position = portion.rows.offset + t;
    const int64_t end = std::min(position + 1, from + kAttendChunk);
    return std::pair(std::min(std::max(first_seen(call, position), from), end), end);
  };
  // Rows [t, t + count) over a group of chunks from `begin` on, with equal visible entries. last: the final read of these chunks.
  const auto attend = [&](const Portion& portion, int64_t kv_head, int64_t part, int64_t begin, int64_t t, int64_t count, bool last) {
    const SequenceRows& rows = portion.rows;
    const int64_t sides = std::min(split.side, portion.chunks - begin);
    const int64_t head = kv_head * split.shared + part * split.part;
    const int64_t heads = std::min(split.part, (kv_head + 1) * split.shared - head), queries = count * heads;
    const float* asked[kMaxQueries];
    Chunk chunks[kMostSide];
    Softmax found[kMostSide * kMaxQueries];
    const auto state = [&](int64_t s, int64_t j) {
      const int64_t number = (t + j / heads) * call.heads + head + j % heads;
      return portion.states_before + number * split.states(portion) + split.sinks + begin + s;
    };
    for (int64_t j = 0; j < queries; ++j) asked[j] = q + query_at(call, rows, t + j / heads, head + j % heads);
    for (int64_t s = 0; s < sides; ++s) {
      const int64_t from = (portion.first + begin + s) * kAttendChunk;
      const auto [first, end] = entries_of(portion, t, begin + s);
      chunks[s] = {nullptr, nullptr, end - first, nullptr, first - from};
      if (end > first) {
        const HeadCache cache = head_block(call, rows, kv_head, from);
        const int64_t skipped = call.packed() ? 0 : (first - from) * row_bytes;
        chunks[s].keys = static_cast<const char*>(cache.keys) + skipped;
        chunks[s].values = static_cast<const char*>(cache.values) + skipped;
      }
      if (last) chunks[s].next = split.next_keys(call, portion, kv_head, begin + split.side + s, s);
      for (int64_t j = 0; j < queries; ++j) found[s * queries + j].acc = accumulators + state(s, j) * dim;
    }
    if (call.packed()) {
      float* scores = scratch(Slot::scores, sides * queries * kAttendChunk + packed_scratch(queries, dim));
      kernels.attend_packed(chunks, sides, call.packings, dim, asked, queries, call.rule, scores, found);
    } else {
      float* scores = scratch(Slot::scores, sides * queries * kAttendChunk);
      kernels.attend_chunks(chunks, sides, call.kv_type, dim, asked, queries, call.rule, scores, found);
    }
    for (int64_t s = 0; s < sides; ++s) {
      for (int64_t j = 0; j < queries; ++j) states[state(s, j)] = found[s * queries + j];
    }
  };
  const auto task = [&](int64_t index) {
    const Portion& portion = split.portion_of<&Portion::tasks_before>(index);
    index -= portion.tasks_before;
    const int64_t part = index % split.parts;
    index /= split.parts;
    const int64_t t = index % portion.sets * split.together, count = std::min(split.together, portion.rows.count - t);
    index /= portion.sets;
    const int64_t begin = index % portion.groups * split.side, kv_head = index / portion.groups;
    const bool last = t + count == portion.rows.count && part + 1 == split.parts;
    // Visible entries of middle rows are between those of the first and the last.
    bool alike = true;
    for (int64_t number = begin; number < std::min(begin + split.side, portion.chunks); ++number) {
      alike = alike && entries_of(portion, t, number) == entries_of(portion, t + count - 1, number);
    }
    if (alike) return attend(portion, kv_head, part, begin, t, count, last);
    for (int64_t i = 0; i < count; ++i) attend(portion, kv_head, part, begin, t + i, 1, last && i + 1 == count);
  };
  pool.run(
      split.tasks,
      [&](Tasks& tasks) {
        while (tasks.next()) task(tasks.index());
      },
      split.products * 2 > kAloneProducts);
  pool.run(
      split.queries,
      [&](Tasks& tasks) {
        while (tasks.next()) {
          const Portion& portion = split.portion_of<&Portion::queries_before>(tasks.index());
          const int64_t number = tasks.index() - portion.queries_before;
          const int64_t at = portion.states_before + number * split.states(portion);
          if (split.sinks != 0) {
            float* acc = accumulators + at * dim;
            std::fill(acc, acc + dim, 0.0f);
            states[at] = first_state(call, number % call.heads, acc);
          }
          const int64_t row = portion.rows.row * call.heads + number;
          kernels.join_states(states + at, split.states(portion), dim, call.out + row * dim);
        }
      },
      split.all_states * dim > kAloneProducts);
}

}  // namespace headrace
