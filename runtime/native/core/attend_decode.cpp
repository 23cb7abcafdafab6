// Attention of the next token, or of a few: the cache is read once per group of heads that share it.
//
// Positions are taken in chunks whose borders are multiples of kAttendChunk, each with a softmax state of its own; the states of
// one query are joined at the end (flash decoding: arXiv:2307.08691 turned to positions). So a query's result has the same bits
// however its chunks are shared out. Work is split over sequences, key/value heads, groups of chunks and tokens, in this order, so
// that several tokens find a chunk in the cache; the chunks of a group are read side by side, because one stream at a time does not keep enough requests to memory under way.
#include <algorithm>

#include "attend.h"
#include "scratch.h"

namespace headrace {
namespace {

constexpr int64_t kMostSide = 2;             // chunks that are read side by side, at most
constexpr int64_t kTasksPerThread = 4;       // fewer, and groups are made smaller
constexpr int64_t kAloneProducts = 1 << 15;  // fewer multiply-adds than this are not worth waking anybody

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How the tasks of one call are numbered: sequence, kv head, group of chunks, token, part of its queries.
struct Split {
  int64_t shared;  // query heads per kv head
  int64_t parts;   // of those, kMaxQueries at a time
  int64_t first;   // chunk that any query sees
  int64_t chunks;  // from there on
  int64_t side;    // of those in a group
  int64_t groups;
  int64_t tasks;

  Split(const AttendCall& call, int threads) : shared(call.heads / call.kv_heads) {
    parts = ceil_div(shared, kMaxQueries);
    first = first_seen(call, call.offset) / kAttendChunk;
    chunks = ceil_div(call.offset + call.length, kAttendChunk) - first;
    const int64_t each = call.batch * call.length * call.kv_heads * parts;
    side = std::clamp<int64_t>(each * chunks / (kTasksPerThread * threads), 1, kMostSide);
    groups = ceil_div(chunks, side);
    tasks = each * groups;
  }
};

}  // namespace

void attend_decode(Pool& pool, const Kernels& kernels, const AttendCall& call, const float* q) {
  const Split split(call, pool.threads());
  const int64_t dim = call.dim;
  const int64_t queries = call.batch * call.length * call.heads;
  // (query, part): its accumulator, then its state. The first part is the head's sink, where there is one, then come chunks.
  const int64_t sinks = call.sinks != nullptr ? 1 : 0, parts = sinks + split.chunks;
  float* accumulators = scratch(Slot::states, queries * parts * (dim + 4));
  auto* states = reinterpret_cast<Softmax*>(accumulators + queries * parts * dim);
  static_assert(sizeof(Softmax) <= 4 * sizeof(float));

  const auto group = [&](int64_t index) {
    const int64_t part = index % split.parts;
    index /= split.parts;
    const int64_t t = index % call.length;
    index /= call.length;
    const int64_t begin = index % split.groups * split.side;
    index /= split.groups;
    const int64_t kv_head = index % call.kv_heads, b = index / call.kv_heads;
    const int64_t count = std::min(split.side, split.chunks - begin);
    const bool more = begin + count < split.chunks && t + 1 == call.length && part + 1 == split.parts;
    const int64_t position = call.offset + t;
    const int64_t head = kv_head * split.shared + part * kMaxQueries;
    const int64_t shared = std::min(kMaxQueries, (kv_head + 1) * split.shared - head);

    const float* rows[kMaxQueries];
    Span spans[kMostSide];
    Softmax found[kMostSide * kMaxQueries];
    const auto query = [&](int64_t j) { return (b * call.length + t) * call.heads + head + j; };
    for (int64_t j = 0; j < shared; ++j) rows[j] = q + ((b * call.heads + head + j) * call.length + t) * dim;
    for (int64_t s = 0; s < count; ++s) {
      const int64_t from = (split.first + begin + s) * kAttendChunk;
      spans[s] = {std::max(first_seen(call, position), from), std::min(position + 1, from + kAttendChunk)};
      for (int64_t j = 0; j < shared; ++j) {
        found[s * shared + j].acc = accumulators + (query(j) * parts + sinks + begin + s) * dim;
      }
    }
    const HeadCache cache = head_cache(call, b, kv_head);
    const char* keys = static_cast<const char*>(cache.keys);
    const char* next = more ? keys + (split.first + begin + count) * kAttendChunk * dim * size_of(call.kv_type) : nullptr;
    float* scores = scratch(Slot::scores, count * shared * kAttendChunk);
    kernels.attend_chunks(cache, rows, shared, spans, count, next, call.rule, scores, found);
    for (int64_t s = 0; s < count; ++s) {
      for (int64_t j = 0; j < shared; ++j) states[query(j) * parts + sinks + begin + s] = found[s * shared + j];
    }
  };
  const int64_t products = queries * split.chunks * kAttendChunk * dim;
  pool.run(
      split.tasks,
      [&](Tasks& tasks) {
        while (tasks.next()) group(tasks.index());
      },
      std::min(products, queries * (call.offset + call.length) * dim) * 2 > kAloneProducts);
  pool.run(
      queries,
      [&](Tasks& tasks) {
        while (tasks.next()) {
          const int64_t i = tasks.index();
          if (sinks != 0) {
            float* acc = accumulators + i * parts * dim;
            std::fill(acc, acc + dim, 0.0f);
            states[i * parts] = first_state(call, i % call.heads, acc);
          }
          kernels.join_states(states + i * parts, parts, dim, call.out + i * dim);
        }
      },
      queries * split.chunks * dim > kAloneProducts);
}

}  // namespace headrace
