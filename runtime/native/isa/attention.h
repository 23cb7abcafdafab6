// Attention over stored keys and values, one pass, with an online softmax (Milakov and Gimelshein,
// arXiv:1805.02867): a running maximum and sum, and an accumulator rescaled when the maximum moves.
#pragma once

#include <type_traits>

#include "elementwise.h"

namespace headrace::HEADRACE_ISA {

// Prefetch distance of keys and values, in entries.
constexpr int64_t kEntriesAhead = 64;
static_assert(kAttendChunk % W == 0 && kEntriesAhead % W == 0);

// Prefetch a row of `bytes`. One row at a time, since a core has a limited number of outstanding requests.
inline void request_row(const char* row, int64_t bytes) {
  for (int64_t byte = 0; byte < bytes; byte += 64) request(row + byte);
}

inline vf soft_cap(vf score, ScoreRule rule) {
  const vf scaled = mul(score, set1(rule.scale));
  if (rule.softcap <= 0) return scaled;
  return mul(set1(rule.softcap), tanh(div(scaled, set1(rule.softcap))));
}

// scores[q * ld + i] = q . k for the W positions from `begin` on; positions past `end` repeat the last one. `ahead`: W rows to
// prefetch, or nullptr.
template <Type T, int Q>
inline void score_block(const HeadCache& kv, const float* const* q, int64_t begin, int64_t end, float* scores,
                        int64_t ld, const char* ahead) {
  for (int p = 0; p < W; p += 4) {
    int64_t at[4];
    for (int i = 0; i < 4; ++i) {
      at[i] = (begin + p + i < end ? begin + p + i : end - 1) * kv.dim;
      if (ahead != nullptr) request_row(ahead + (p + i) * kv.dim * size_of(T), kv.dim * size_of(T));
    }
    vf acc[Q][4];
    for (int j = 0; j < Q; ++j) {
      for (int i = 0; i < 4; ++i) acc[j][i] = zero();
    }
    for (int64_t d = 0; d < kv.dim; d += W) {
      vf key[4];
      for (int i = 0; i < 4; ++i) key[i] = load_as<T>(kv.keys, at[i] + d);
      for (int j = 0; j < Q; ++j) {
        const vf query = load(q[j] + d);
        for (int i = 0; i < 4; ++i) acc[j][i] = fma(query, key[i], acc[j][i]);
      }
    }
    for (int j = 0; j < Q; ++j) store_sums4(scores + j * ld + p, acc[j][0], acc[j][1], acc[j][2], acc[j][3]);
  }
}

// scores[0, n) become exp(soft-capped score - top) within [lo, hi) and 0 outside; n is padded to whole vectors. Updates the
// state's top and sum and returns the factor of its accumulator.
inline float softmax_row(float* scores, int64_t n, int64_t lo, int64_t hi, ScoreRule rule, Softmax* state) {
  if (lo >= hi) {
    for (int64_t i = 0; i < n; i += W) store(scores + i, zero());
    return 1.0f;
  }
  constexpr float kNever = -__builtin_inff();
  for (int64_t i = 0; i < n; i += W) store(scores + i, soft_cap(load(scores + i), rule));
  for (int64_t i = 0; i < lo; ++i) scores[i] = kNever;
  for (int64_t i = hi; i < n; ++i) scores[i] = kNever;
  vf highest = set1(state->top);
  for (int64_t i = 0; i < n; i += W) highest = max(highest, load(scores + i));
  const float top = maximum(highest);
  vf total = zero();
  for (int64_t i = 0; i < n; i += W) {
    const vf e = exp(sub(load(scores + i), set1(top)));
    store(scores + i, e);
    total = add(total, e);
  }
  alignas(64) float shrink[W];
  store(shrink, exp(sub(set1(state->top), set1(top))));
  state->top = top;
  state->sum = state->sum * shrink[0] + sum(total);
  return shrink[0];
}

// acc[j][d, d + V * W) += sum over p of scores[j * ld + p] * value[p], for entries [begin, end); from 0 if these are the first.
template <Type T, int Q, int V>
inline void weigh_values(const HeadCache& kv, int64_t begin, int64_t end, int64_t d, const float* scores, int64_t ld,
                         bool first, const Softmax* state, const char* ahead) {
  vf acc[Q][V];
  for (int j = 0; j < Q; ++j) {
    for (int v = 0; v < V; ++v) acc[j][v] = first ? zero() : load(state[j].acc + d + v * W);
  }
  for (int64_t p = begin; p < end; ++p) {
    if (d == 0 && ahead != nullptr) request_row(ahead + (p - begin) * kv.dim * size_of(T), kv.dim * size_of(T));
    vf value[V];
    for (int v = 0; v < V; ++v) value[v] = load_as<T>(kv.values, p * kv.dim + d + v * W);
    for (int j = 0; j < Q; ++j) {
      const vf weight = set1(scores[j * ld + p - begin]);
      for (int v = 0; v < V; ++v) acc[j][v] = fma(weight, value[v], acc[j][v]);
    }
  }
  for (int j = 0; j < Q; ++j) {
    for (int v = 0; v < V; ++v) store(state[j].acc + d + v * W, acc[j][v]);
  }
}

template <int Q, class Act>
inline void with_number(int64_t number, int64_t first, const Act& act) {
  if constexpr (Q > 1) {
    if (number < Q) return with_number<Q - 1>(number, first, act);
  }
  act(std::integral_constant<int, Q>{}, first);
}

// Call act(number, first) for even parts of at most kQueries; the number is a compile-time constant.
template <class Act>
inline void few_at_a_time(int64_t queries, const Act& act) {
  for (int64_t first = 0, parts = (queries + kQueries - 1) / kQueries; parts > 0; --parts) {
    const int64_t number = (queries - first + parts - 1) / parts;
    with_number<kQueries>(number, first, act);
    first += number;
  }
}

// Chunks alternate every W entries, each a stream of its own, values after keys. All queries use an entry while it is in registers or
// the L1.
template <Type T>
inline void attend_chunks_as(const Chunk* chunks, int64_t count, int64_t dim, const float* const* q, int64_t queries,
                             ScoreRule rule, float* scores, Softmax* states) {
  constexpr int64_t ld = kAttendChunk;
  constexpr int V = kPanelVectors;
  const int64_t row = dim * size_of(T);
  for (int64_t p = 0; p < kAttendChunk; p += W) {
    for (int64_t s = 0; s < count; ++s) {
      const int64_t n = chunks[s].n, ahead = p + kEntriesAhead;
      if (p >= n) continue;
      const HeadCache kv{chunks[s].keys, chunks[s].values, dim, T};
      const char* later = ahead < n ? chunks[s].keys + ahead * row : chunks[s].values + (ahead - n) * row;
      few_at_a_time(queries, [&](auto few, int64_t j) {
        score_block<T, few()>(kv, q + j, p, n, scores + (s * queries + j) * ld + p, ld, j == 0 ? later : nullptr);
      });
    }
  }
  for (int64_t s = 0; s < count; ++s) {
    const int64_t n = chunks[s].n, whole = (n + kScorePad - 1) / kScorePad * kScorePad;
    for (int64_t j = 0; j < queries; ++j) {
      Softmax& state = states[s * queries + j];
      state.top = -__builtin_inff();
      state.sum = 0;
      if (n > 0) {
        softmax_row(scores + (s * queries + j) * ld, whole, 0, n, rule, &state);
      } else {
        for (int64_t d = 0; d < dim; d += W) store(state.acc + d, zero());
      }
    }
  }
  for (int64_t p = 0; p < kAttendChunk; p += W) {
    for (int64_t s = 0; s < count; ++s) {
      const int64_t n = chunks[s].n, ahead = p + kEntriesAhead;
      if (p >= n) continue;
      const HeadCache kv{chunks[s].keys, chunks[s].values, dim, T};
      const char* later = ahead < n || chunks[s].next == nullptr ? chunks[s].values + ahead * row
                                                                 : chunks[s].next + (ahead - n) * row;
      const int64_t end = p + W < n ? p + W : n;
      few_at_a_time(queries, [&](auto few, int64_t j) {
        const float* weights = scores + (s * queries + j) * ld + p;
        const Softmax* to = states + s * queries + j;
        const char* ask = j == 0 ? later : nullptr;
        int64_t d = 0;
        for (; d + V * W <= dim; d += V * W) weigh_values<T, few(), V>(kv, p, end, d, weights, ld, p == 0, to, ask);
        for (; d < dim; d += W) weigh_values<T, few(), 1>(kv, p, end, d, weights, ld, p == 0, to, ask);
      });
    }
  }
}

inline void attend_chunks(const Chunk* chunks, int64_t count, Type type, int64_t dim, const float* const* q,
                          int64_t queries, ScoreRule rule, float* scores, Softmax* states) {
  switch (type) {
    case Type::f16: return attend_chunks_as<Type::f16>(chunks, count, dim, q, queries, rule, scores, states);
    case Type::bf16: return attend_chunks_as<Type::bf16>(chunks, count, dim, q, queries, rule, scores, states);
    default: return attend_chunks_as<Type::f32>(chunks, count, dim, q, queries, rule, scores, states);
  }
}

// Merge `count` states, at least one of them not empty, and divide by their sum.
inline void join_states(const Softmax* states, int64_t count, int64_t dim, float* out) {
  float top = states[0].top;
  for (int64_t i = 1; i < count; ++i) top = states[i].top > top ? states[i].top : top;
  float sum = 0;
  for (int64_t first = 0; first < count; first += W) {
    const int64_t here = count - first < W ? count - first : W;
    alignas(64) float weights[W];
    for (int i = 0; i < W; ++i) weights[i] = i < here ? states[first + i].top : -__builtin_inff();
    store(weights, exp(sub(load(weights), set1(top))));
    for (int64_t i = 0; i < here; ++i) sum += weights[i] * states[first + i].sum;
    for (int64_t d = 0; d < dim; d += W) {
      vf acc = first == 0 ? zero() : load(out + d);
      for (int64_t i = 0; i < here; ++i) acc = fma(set1(weights[i]), load(states[first + i].acc + d), acc);
      store(out + d, acc);
    }
  }
  const vf share = set1(1 / sum);
  for (int64_t d = 0; d < dim; d += W) store(out + d, mul(load(out + d), share));
}

}  // namespace headrace::HEADRACE_ISA
