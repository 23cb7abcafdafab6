// Attention over stored keys and values, one pass, with an online softmax (Milakov and Gimelshein,
// arXiv:1805.02867): a running maximum and sum, and an accumulator rescaled when the maximum moves.
//
// For decode (core/attend_decode.cpp: attend_chunk, join_states) and prefill in floats (core/attend_prefill.cpp: softmax_row). Keys and
// values of a head are rows of `dim` numbers, contiguous.
// Guard: runtime/native/tests/attention.cpp; tests/runtime/ops/test_native_kernels.py.
#pragma once

#include <type_traits>

#include "elementwise.h"

namespace headrace::HEADRACE_ISA {

static_assert(kAttendChunk % W == 0);

// Prefetch a few lines at a time, from two places beside each other: two streams of memory, whatever the order of work.
template <int Locality>  // of __builtin_prefetch: 2 as far as the L2, 3 into the L1
struct Requests {
  Places places, behind;
  int64_t at = 0, due = 0;  // bytes of each: asked for, in whole lines, and to be asked for by now

  // The share of each step if `steps` of them ask for all that is left. Less than a line is asked for by some of the steps.
  int64_t share(int64_t steps) const { return (places.bytes + behind.bytes - due + steps - 1) / steps; }

  void some(int64_t bytes) {
    due += bytes;
    const int64_t to = due < places.bytes ? due : places.bytes;
    for (; at < to; at += 64) {
      __builtin_prefetch(places.first + at, 0, Locality);  // GCC drops calls of request() here as if they had no effect
      __builtin_prefetch(places.second + at, 0, Locality);
    }
    if (at >= places.bytes && behind.bytes > 0) due -= places.bytes, places = behind, behind = {}, at = 0;
  }

  void rest() {
    some(places.bytes);
    some(places.bytes);
  }
};

inline vf soft_cap(vf score, ScoreRule rule) {
  const vf scaled = mul(score, set1(rule.scale));
  if (rule.softcap <= 0) return scaled;
  return mul(set1(rule.softcap), tanh(div(scaled, set1(rule.softcap))));
}

// acc[j][i] (+)= q[j] . key[i] over V vectors from d on, for keys [from, from + N). Queries stay in registers.
template <Type T, int Q, int V, int N, bool First>
[[gnu::always_inline]] inline void score_part(const char* const (&keys)[4], const float* const* q, int64_t d, int from, vf (&acc)[Q][4]) {
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) {
    vf query[Q];
#pragma GCC unroll 8
    for (int j = 0; j < Q; ++j) query[j] = load(q[j] + d + v * W);
#pragma GCC unroll 4
    for (int i = from; i < from + N; ++i) {
      const vf key = load_as<T>(keys[i], d + v * W);
#pragma GCC unroll 8
      for (int j = 0; j < Q; ++j) acc[j][i] = First && v == 0 ? mul(query[j], key) : fma(query[j], key, acc[j][i]);
    }
  }
}

// scores[j * ld + i] = q[j] . key i for i < n, and those up to a multiple of four repeat the last one. Asks for `bytes` with four keys.
template <Type T, int Q>
[[gnu::noinline]] void score_keys(const char* keys, int64_t n, int64_t dim, const float* const* q, float* scores, int64_t ld,
                                  Requests<2>& requests, int64_t bytes) {
  constexpr int V = W == 16 ? 4 : 1;
  constexpr int N = W == 8 && Q > 3 ? 2 : 4;  // keys whose sums fit the registers
  const int64_t row = dim * size_of(T);
  Requests<2> ask = requests;
  for (int64_t p = 0; p < n; p += 4, keys += 4 * row, scores += 4) {
    ask.some(bytes);
    const int64_t last = n - 1 - p;
    const char* four[4];
    for (int i = 0; i < 4; ++i) four[i] = keys + (i < last ? i : last) * row;
    vf acc[Q][4];
#pragma GCC unroll 2
    for (int from = 0; from < 4; from += N) {
      int64_t d = 0;
      if (dim >= V * W) {
        score_part<T, Q, V, N, true>(four, q, 0, from, acc);
        for (d = V * W; d + V * W <= dim; d += V * W) score_part<T, Q, V, N, false>(four, q, d, from, acc);
      } else {
        score_part<T, Q, 1, N, true>(four, q, 0, from, acc);
        d = W;
      }
      for (; d < dim; d += W) score_part<T, Q, 1, N, false>(four, q, d, from, acc);
    }
#pragma GCC unroll 8
    for (int j = 0; j < Q; ++j) store_sums4(scores + j * ld, acc[j][0], acc[j][1], acc[j][2], acc[j][3]);
  }
  requests = ask;
}

// scores[0, n) become soft-capped scores within [lo, hi), which is not empty, and -infinity outside; n is padded to whole vectors.
// Returns their maxima and `highest`.
inline vf cap_scores(float* scores, int64_t n, int64_t lo, int64_t hi, ScoreRule rule, vf highest) {
  for (int64_t i = 0; i < n; i += W) {
    vf capped = soft_cap(load(scores + i), rule);
    store(scores + i, capped);
    if (i < lo || i + W > hi) {
      for (int64_t at = i; at < i + W; ++at) scores[at] = at < lo || at >= hi ? -__builtin_inff() : scores[at];
      capped = load(scores + i);
    }
    highest = max(highest, capped);
  }
  return highest;
}

// scores[0, n) become exp(score - top); returns their sum.
inline float weigh_scores(float* scores, int64_t n, float top) {
  vf total = zero();
  for (int64_t i = 0; i < n; i += W) {
    const vf weight = exp(sub(load(scores + i), set1(top)));
    store(scores + i, weight);
    total = add(total, weight);
  }
  return sum(total);
}

// scores[0, n) become exp(soft-capped score - top) within [lo, hi) and 0 outside. Updates the state's top and sum and returns the
// factor of its accumulator.
inline float softmax_row(float* scores, int64_t n, int64_t lo, int64_t hi, ScoreRule rule, Softmax* state) {
  if (lo >= hi) {
    for (int64_t i = 0; i < n; i += W) store(scores + i, zero());
    return 1.0f;
  }
  const float top = maximum(cap_scores(scores, n, lo, hi, rule, set1(state->top)));
  alignas(64) float shrink[W];
  store(shrink, exp(sub(set1(state->top), set1(top))));
  state->top = top;
  state->sum = state->sum * shrink[0] + weigh_scores(scores, n, top);
  return shrink[0];
}

// The same for several rows, `ld` apart, of new states. Row by row, since each step waits for its result.
inline void softmax_rows(float* scores, int64_t ld, int64_t rows, int64_t n, int64_t lo, int64_t hi, ScoreRule rule, Softmax* states) {
  for (int64_t j = 0; j < rows; ++j) states[j].top = maximum(cap_scores(scores + j * ld, n, lo, hi, rule, set1(-__builtin_inff())));
  for (int64_t j = 0; j < rows; ++j) states[j].sum = weigh_scores(scores + j * ld, n, states[j].top);
}

// out[j][d, d + V * W) = sum over i < n of weights[j * ld + i] * value i. Asks for `bytes` with four values.
template <Type T, int Q, int V>
[[gnu::noinline]] void weigh_values(const char* values, int64_t n, int64_t dim, int64_t d, const float* weights, int64_t ld,
                                    const Softmax* out, Requests<2>& requests, int64_t bytes) {
  const int64_t row = dim * size_of(T);
  Requests<2> ask = requests;
  vf acc[Q][V];
#pragma GCC unroll 8
  for (int j = 0; j < Q; ++j) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) acc[j][v] = zero();
  }
  for (int64_t p = 0; p < n; ++p, values += row) {
    if (p % 4 == 0) ask.some(bytes);
    vf weight[Q];
#pragma GCC unroll 8
    for (int j = 0; j < Q; ++j) weight[j] = set1(weights[j * ld + p]);
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      const vf value = load_as<T>(values, d + v * W);
#pragma GCC unroll 8
      for (int j = 0; j < Q; ++j) acc[j][v] = fma(weight[j], value, acc[j][v]);
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < Q; ++j) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(out[j].acc + d + v * W, acc[j][v]);
  }
  requests = ask;
}

// Vectors of values for which so many queries have sums in registers: eight sums and more, so that none waits for the one before.
constexpr int value_vectors(int queries) {
  if (W == 8) return queries == 1 ? 8 : queries < 4 ? 4 : 2;
  return kPanelVectors;
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

// How often all values of a chunk are read: each part of the queries reads a few columns at a time.
inline int64_t value_passes(int64_t queries, int64_t dim) {
  int64_t passes = 0;
  few_at_a_time(queries, [&](auto few, int64_t) {
    constexpr int64_t columns = value_vectors(few()) * W;
    passes += dim / columns + (dim % columns + W - 1) / W;
  });
  return passes;
}

// All queries use an entry while it is in registers or the L1. Scores and all passes over values take about as long, so each asks
// for half of the next chunk, evenly: memory would be idle behind requests made in a burst.
template <Type T>
inline void attend_chunk_as(const Chunk& chunk, int64_t dim, const float* const* q, int64_t queries, ScoreRule rule, float* scores,
                            Softmax* states) {
  constexpr int64_t ld = kAttendChunk;
  const int64_t n = chunk.n, fours = (n + 3) / 4, whole = (n + kScorePad - 1) / kScorePad * kScorePad;
  Requests<2> own{chunk.own, {}}, next{chunk.next[0], chunk.next[1]}, none{};
  own.rest();
  const int64_t with_keys = next.share(fours * 2);
  few_at_a_time(queries, [&](auto few, int64_t j) {
    score_keys<T, few()>(chunk.keys, n, dim, q + j, scores + j * ld, ld, j == 0 ? next : none, with_keys);
  });
  softmax_rows(scores, ld, queries, whole, 0, n, rule, states);
  const int64_t with_values = next.share(fours * value_passes(queries, dim));
  few_at_a_time(queries, [&](auto few, int64_t j) {
    constexpr int V = value_vectors(few());
    const float* weights = scores + j * ld;
    int64_t d = 0;
    for (; d + V * W <= dim; d += V * W) {
      weigh_values<T, few(), V>(chunk.values, n, dim, d, weights, ld, states + j, next, with_values);
    }
    for (; d < dim; d += W) weigh_values<T, few(), 1>(chunk.values, n, dim, d, weights, ld, states + j, next, with_values);
  });
  next.rest();
}

inline void attend_chunk(const Chunk& chunk, Type type, int64_t dim, const float* const* q, int64_t queries, ScoreRule rule,
                         float* scores, Softmax* states) {
  switch (type) {
    case Type::f16: return attend_chunk_as<Type::f16>(chunk, dim, q, queries, rule, scores, states);
    case Type::bf16: return attend_chunk_as<Type::bf16>(chunk, dim, q, queries, rule, scores, states);
    default: return attend_chunk_as<Type::f32>(chunk, dim, q, queries, rule, scores, states);
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
