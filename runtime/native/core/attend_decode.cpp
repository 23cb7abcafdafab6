// Attention for one or a few new tokens: the cache is read once per group of heads that share it.
//
// Work is split over sequences, key/value heads and chunks of positions. Each task keeps a softmax state of its own;
// the states of one query are merged at the end (flash decoding: arXiv:2307.08691 turned to positions). Where one chunk
// is all there is, its accumulator is the output.
#include <algorithm>
#include <cmath>
#include <limits>

#include "attend.h"
#include "scratch.h"

namespace headrace {
namespace {

constexpr int64_t kChunk = 128;            // positions a task reads at once
constexpr int64_t kAloneProducts = 1 << 15;  // fewer multiply-adds than this are not worth waking anybody

// How the tasks of one call are numbered: sequence, token, kv head, part of its queries, chunk of positions.
struct Split {
  const AttendCall& call;
  int64_t shared;     // query heads per kv head
  int64_t parts;      // of those, kMaxQueries at a time
  int64_t chunks;  // of positions
  int64_t begin;      // first position any query sees

  explicit Split(const AttendCall& c) : call(c), shared(c.heads / c.kv_heads) {
    parts = (shared + kMaxQueries - 1) / kMaxQueries;
    begin = first_seen(c, c.offset);
    chunks = (c.offset + c.length - begin + kChunk - 1) / kChunk;
  }
  int64_t tasks() const { return call.batch * call.length * call.kv_heads * parts * chunks; }
};

float merged(const Softmax* states, int64_t count, int64_t dim, float* out) {
  float top = -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < count; ++i) top = std::max(top, states[i].top);
  float sum = 0;
  std::fill(out, out + dim, 0.0f);
  for (int64_t i = 0; i < count; ++i) {
    if (states[i].sum == 0) continue;  // saw nothing: outside this query's window
    const float weight = std::exp(states[i].top - top);
    sum += weight * states[i].sum;
    for (int64_t d = 0; d < dim; ++d) out[d] += weight * states[i].acc[d];
  }
  return sum;
}

}  // namespace

void attend_decode(Pool& pool, const Kernels& kernels, const AttendCall& call, const float* q) {
  const Split split(call);
  AttendCall bare = call;
  bare.sinks = nullptr;  // they count once
  const int64_t dim = call.dim;
  const int64_t queries = call.batch * call.length * call.heads;
  // (query, chunk): its accumulator, then its state.
  float* accumulators = scratch(Slot::states, queries * split.chunks * (dim + 4));
  auto* states = reinterpret_cast<Softmax*>(accumulators + queries * split.chunks * dim);
  static_assert(sizeof(Softmax) <= 4 * sizeof(float));

  auto body = [&](Tasks& tasks) {
    while (tasks.next()) {
      int64_t index = tasks.index();
      const int64_t chunk = index % split.chunks;
      index /= split.chunks;
      const int64_t part = index % split.parts;
      index /= split.parts;
      const int64_t kv_head = index % call.kv_heads;
      index /= call.kv_heads;
      const int64_t t = index % call.length, b = index / call.length;

      const int64_t position = call.offset + t;
      const int64_t lo = std::max(first_seen(call, position), split.begin + chunk * kChunk);
      const int64_t hi = std::min(position + 1, split.begin + (chunk + 1) * kChunk);
      const int64_t first = kv_head * split.shared + part * kMaxQueries;
      const int64_t count = std::min(kMaxQueries, (kv_head + 1) * split.shared - first);
      const float* rows[kMaxQueries];
      Softmax state[kMaxQueries];
      for (int64_t j = 0; j < count; ++j) {
        rows[j] = q + ((b * call.heads + first + j) * call.length + t) * dim;
        const int64_t query = (b * call.length + t) * call.heads + first + j;
        float* acc = split.chunks == 1 ? call.out + query * dim
                                          : accumulators + (query * split.chunks + chunk) * dim;
        std::fill(acc, acc + dim, 0.0f);
        state[j] = first_state(chunk == 0 ? call : bare, first + j, acc);
      }
      if (lo < hi) {
        float* scores = scratch(Slot::scores, kMaxQueries * kChunk);
        kernels.attend_chunk(head_cache(call, b, kv_head), rows, count, lo, hi, call.rule, scores, state);
      }
      for (int64_t j = 0; j < count; ++j) {
        const int64_t query = (b * call.length + t) * call.heads + first + j;
        if (split.chunks == 1) {
          kernels.rescale(state[j].acc, 1 / state[j].sum, dim);
        } else {
          states[query * split.chunks + chunk] = state[j];
        }
      }
    }
  };
  const int64_t padded = (call.offset + call.length - split.begin + kScorePad - 1) / kScorePad * kScorePad;
  pool.run(split.tasks(), body, queries * padded * dim * 2 > kAloneProducts);

  if (split.chunks == 1) return;
  for (int64_t i = 0; i < queries; ++i) {
    float* out = call.out + i * dim;
    const float sum = merged(states + i * split.chunks, split.chunks, dim, out);
    for (int64_t d = 0; d < dim; ++d) out[d] /= sum;
  }
}

}  // namespace headrace
