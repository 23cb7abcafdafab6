// Attention over stored keys and values, one pass, with an online softmax (Milakov and Gimelshein,
// arXiv:1805.02867): a running maximum and sum, and an accumulator rescaled when the maximum moves.
#pragma once

#include "elementwise.h"

namespace headrace::HEADRACE_ISA {

// Entries ahead of the arithmetic that keys and values are asked for: they come from memory once a cache is long.
constexpr int64_t kEntriesAhead = 32;

// One entry's row, `kEntriesAhead` past `entry`, one request a cache line.
template <Type T>
inline void request_row(const void* rows, int64_t entry, int64_t dim) {
  const char* row = static_cast<const char*>(rows) + (entry + kEntriesAhead) * dim * size_of(T);
  for (int64_t byte = 0; byte < dim * size_of(T); byte += 64) __builtin_prefetch(row + byte);
}

inline vf soft_cap(vf score, ScoreRule rule) {
  const vf scaled = mul(score, set1(rule.scale));
  if (rule.softcap <= 0) return scaled;
  return mul(set1(rule.softcap), tanh(div(scaled, set1(rule.softcap))));
}

// scores[q * ld + i] = q . k for the W positions from `begin` on; positions past `end` repeat the last one.
template <Type T, int Q>
inline void score_block(const HeadCache& kv, const float* const* q, int64_t begin, int64_t end, float* scores,
                        int64_t ld) {
  vf dots[Q][W];
  for (int p = 0; p < W; p += 4) {
    int64_t at[4];
    for (int i = 0; i < 4; ++i) {
      at[i] = (begin + p + i < end ? begin + p + i : end - 1) * kv.dim;
      request_row<T>(kv.keys, begin + p + i, kv.dim);
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
    for (int j = 0; j < Q; ++j) {
      for (int i = 0; i < 4; ++i) dots[j][p + i] = acc[j][i];
    }
  }
  for (int j = 0; j < Q; ++j) store(scores + j * ld, sums(dots[j]));
}

// scores[0, n) become exp(soft-capped score - top) within [lo, hi) and 0 outside; n is padded to whole vectors. Moves the
// state's top and sum and returns the factor that its accumulator has to be multiplied with.
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

// acc[j][d, d + V * W) = acc * factor + sum over p of scores[j * ld + p] * value[p].
template <Type T, int Q, int V>
inline void weigh_values(const HeadCache& kv, int64_t begin, int64_t end, int64_t d, const float* scores,
                         int64_t ld, const float* factors, Softmax* state) {
  vf acc[Q][V];
  for (int j = 0; j < Q; ++j) {
    for (int v = 0; v < V; ++v) acc[j][v] = mul(load(state[j].acc + d + v * W), set1(factors[j]));
  }
  for (int64_t p = begin; p < end; ++p) {
    if (d == 0) request_row<T>(kv.values, p, kv.dim);
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

template <Type T, int Q>
inline void attend_chunk_of(const HeadCache& kv, const float* const* q, int64_t begin, int64_t end,
                            ScoreRule rule, float* scores, Softmax* state) {
  const int64_t n = end - begin;
  const int64_t ld = (n + kScorePad - 1) / kScorePad * kScorePad;
  for (int64_t p = 0; p < ld; p += W) score_block<T, Q>(kv, q, begin + p, end, scores + p, ld);
  float factors[Q];
  for (int j = 0; j < Q; ++j) factors[j] = softmax_row(scores + j * ld, ld, 0, n, rule, &state[j]);
  constexpr int V = kPanelVectors;
  int64_t d = 0;
  for (; d + V * W <= kv.dim; d += V * W) {
    weigh_values<T, Q, V>(kv, begin, end, d, scores, ld, factors, state);
  }
  for (; d < kv.dim; d += W) weigh_values<T, Q, 1>(kv, begin, end, d, scores, ld, factors, state);
}

template <Type T>
inline void attend_chunk_as(const HeadCache& kv, const float* const* q, int64_t queries, int64_t begin,
                            int64_t end, ScoreRule rule, float* scores, Softmax* state) {
  switch (queries) {
    case 1: return attend_chunk_of<T, 1>(kv, q, begin, end, rule, scores, state);
    case 2: return attend_chunk_of<T, 2>(kv, q, begin, end, rule, scores, state);
    case 3: return attend_chunk_of<T, 3>(kv, q, begin, end, rule, scores, state);
    default: return attend_chunk_of<T, 4>(kv, q, begin, end, rule, scores, state);
  }
}

inline void attend_chunk(const HeadCache& kv, const float* const* q, int64_t queries, int64_t begin,
                         int64_t end, ScoreRule rule, float* scores, Softmax* state) {
  switch (kv.type) {
    case Type::f16: return attend_chunk_as<Type::f16>(kv, q, queries, begin, end, rule, scores, state);
    case Type::bf16: return attend_chunk_as<Type::bf16>(kv, q, queries, begin, end, rule, scores, state);
    default: return attend_chunk_as<Type::f32>(kv, q, queries, begin, end, rule, scores, state);
  }
}

}  // namespace headrace::HEADRACE_ISA
