// Attention with both products in 16-bit integers: twice as many multiply-adds per instruction as in float32.
//
// A lane belongs to a query; keys and values are broadcast pair by pair, so nothing is summed across lanes. Inputs come from
// round_attention.h. An entry's contribution, its softmax weight times the power of two of its value, is rounded to 15 bits of the
// largest in its block, or 1 / 2^18 of the block's sum if that is more (times 2^13: 2^31). Rounding relative to the weight alone would
// lose the other entries beside an attention sink, which has nearly all the weight and a small value.
#pragma once

#include "attention.h"
#include "round_attention.h"

namespace headrace::HEADRACE_ISA {

constexpr int kMeet = W == 16 ? 8 : 4;   // numbers of an entry per group of vectors, limited by registers
constexpr float kWeightSum = 262000.0f;  // and half a unit more for each entry: times 8191 less than 2^31
constexpr float kUnseen = -1e38f;        // score of masked entries: below kLowest, so without weight
constexpr float kLn2 = 0.693147181f;
static_assert(kRoundedEntries % kMeet == 0 && kMeet % 2 == 0);

// 2^x for -126 <= x <= 0, and 2^-126 below, to 3e-6 of it. NaN stays NaN: the order of max's operands matters.
inline vf exp2_roughly(vf x) {
  const vf bounded = max(set1(-126.0f), x);
  const vf whole = round_even(bounded);
  const vf r = sub(bounded, whole);
  vf p = fma(r, set1(0.00957010195f), set1(0.0559178616f));
  p = fma(p, r, set1(0.240247448f));
  p = fma(p, r, set1(0.693121815f));
  p = fma(p, r, set1(0.999999261f));
  return times_power_of_two(p, whole);
}

// acc[m][r] = sum over `depth` steps of pair m of `broadcast` (step, m) times vector r of `lanes` (step, r).
template <int R>
[[gnu::always_inline]] inline void meet_pairs(const float* broadcast, int64_t step, int64_t apart, const float* lanes,
                                              int64_t lane_step, int64_t depth, vi (&acc)[kMeet][R]) {
  for (int m = 0; m < kMeet; ++m) {
    for (int r = 0; r < R; ++r) acc[m][r] = vi{};
  }
  for (int64_t i = 0; i < depth; ++i) {
    vi row[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) row[r] = load_words(reinterpret_cast<const uint32_t*>(lanes + i * lane_step + r * W));
#pragma GCC unroll 8
    for (int m = 0; m < kMeet; ++m) {
      const vi x = set1_word(broadcast + i * step + m * apart);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) acc[m][r] = dot_pairs(acc[m][r], x, row[r]);
    }
  }
}

// scores[key][lane] of `n` entries, with the exponents of their values; leaves each lane's highest in `top`.
template <int R>
inline void rounded_scores(const EntryBlock& block, int64_t n, int64_t dim, const QueryRows& rows, int64_t lane,
                           float* scores, vf (&top)[R]) {
  const int64_t stride = round_up(dim / 2, W);
  vf scale[R];
  for (int r = 0; r < R; ++r) {
    scale[r] = load(rows.scales + lane + r * W);
    top[r] = set1(kLowest);
  }
  for (int64_t key = 0; key < n; key += kMeet) {
    vi dots[kMeet][R];
    meet_pairs<R>(block.keys + key * stride, 1, stride, rows.words + lane, kRoundedRows, dim / 2, dots);
#pragma GCC unroll 8
    for (int m = 0; m < kMeet; ++m) {
      const vf key_scale = set1(block.key_scales[key + m]), exponent = set1(block.value_exponents[key + m]);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const vf score = fma(to_float(dots[m][r]), mul(key_scale, scale[r]), exponent);
        store(scores + ((key + m) * R + r) * W, score);
        top[r] = max(top[r], score);
      }
    }
  }
}

// Soft-cap the scores of n entries and mask later ones, those before a query's first, and padding up to `padded`.
template <int R>
inline void bend_and_hide(const EntryBlock& block, int64_t first, int64_t n, int64_t padded, const ScoreRule& rule,
                          bool hides, const QueryRows& rows, int64_t lane, float* scores, vf (&top)[R]) {
  for (int r = 0; r < R; ++r) {
    top[r] = set1(kLowest);
    const vf position = load(rows.positions + lane + r * W), earliest = load(rows.firsts + lane + r * W);
    for (int64_t key = 0; key < n; ++key) {
      float* at = scores + (key * R + r) * W;
      vf score = load(at);
      if (rule.softcap > 0) {
        const vf exponent = set1(block.value_exponents[key]);
        score = fma(set1(rule.softcap / kLn2), tanh(div(sub(score, exponent), set1(rule.softcap))), exponent);
      }
      if (hides) {
        const vf entry = set1(static_cast<float>(first + key));
        const vf seen = where_above(sub(position, entry), -0.5f, where_above(sub(entry, earliest), -0.5f, set1(1.0f)));
        score = add(where_above(seen, 0.5f, score), mul(sub(set1(1.0f), seen), set1(kUnseen)));
      }
      store(at, score);
      top[r] = max(top[r], score);
    }
    for (int64_t key = n; key < padded; ++key) store(scores + (key * R + r) * W, set1(kUnseen));
  }
}

// Round scores[key][lane] to pairs weights[key / 2][lane]; `unit` is the value of 1 times 1 relative to each lane's new running top,
// and `shrink` the factor of the old one.
template <int R>
inline void rounded_weights(const EntryBlock& block, int64_t n, const vf (&top)[R], const QueryRows& rows, int64_t lane,
                            float* scores, float* weights, vf (&shrink)[R], vf (&unit)[R]) {
  vf total[R], sum[R], factor[R];
  for (int r = 0; r < R; ++r) total[r] = sum[r] = zero();
  for (int64_t key = 0; key < n; ++key) {
    const vf share = set1(block.value_shares[key]);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      float* at = scores + (key * R + r) * W;
      const vf e = exp2_roughly(sub(load(at), top[r]));
      store(at, e);
      total[r] = add(total[r], e);
      sum[r] = fma(e, share, sum[r]);  // the softmax weight alone
    }
  }
  for (int r = 0; r < R; ++r) {
    factor[r] = min(set1(kLargest), div(set1(kWeightSum), total[r]));  // in the order that keeps NaN
  }
  for (int64_t key = 0; key < n; key += 2) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const float* at = scores + (key * R + r) * W;
      const vf even = mul(load(at), factor[r]), odd = mul(load(at + R * W), factor[r]);
      store_words(weights + (key / 2 * R + r) * W, join_pairs(even, odd));
    }
  }
  for (int r = 0; r < R; ++r) {
    const int64_t at = lane + r * W;
    const vf before = load(rows.top + at), now = max(before, top[r]);
    shrink[r] = exp(mul(sub(before, now), set1(kLn2)));
    const vf here = exp(mul(sub(top[r], now), set1(kLn2)));
    unit[r] = div(mul(here, set1(0x1p-12f)), factor[r]);
    store(rows.top + at, now);
    store(rows.sum + at, fma(load(rows.sum + at), shrink[r], mul(sum[r], here)));
  }
}

template <int R>
inline void attend_lanes(const EntryBlock& block, int64_t first, int64_t n, int64_t dim, ScoreRule rule, bool hides,
                         const QueryRows& rows, int64_t lane) {
  alignas(64) float scores[kRoundedEntries * R * W];
  alignas(64) float weights[kRoundedEntries / 2 * R * W];
  const int64_t padded = round_up(n, kMeet);
  vf top[R], shrink[R], unit[R];
  rounded_scores<R>(block, padded, dim, rows, lane, scores, top);
  if (hides || rule.softcap > 0 || padded > n) {
    bend_and_hide<R>(block, first, n, padded, rule, hides, rows, lane, scores, top);
  }
  rounded_weights<R>(block, padded, top, rows, lane, scores, weights, shrink, unit);
  for (int64_t d = 0; d < dim; d += kMeet) {
    vi dots[kMeet][R];
    meet_pairs<R>(block.values + d, dim, 1, weights, R * W, padded / 2, dots);
#pragma GCC unroll 8
    for (int m = 0; m < kMeet; ++m) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        float* acc = rows.acc + (d + m) * kRoundedRows + lane + r * W;
        store(acc, fma(load(acc), shrink[r], mul(to_float(dots[m][r]), unit[r])));
      }
    }
  }
}

// Attend with `count` queries to the first n entries of a block at position `first`.
inline void attend_rounded(const EntryBlock& block, int64_t first, int64_t n, int64_t dim, ScoreRule rule, bool hides,
                           const QueryRows& rows, int64_t count) {
  int64_t lane = 0;
  for (; count - lane > (kRowVectors - 1) * W; lane += kRoundedRows) {
    attend_lanes<kRowVectors>(block, first, n, dim, rule, hides, rows, lane);
  }
  if (kRowVectors > 2 && count - lane > W) {
    attend_lanes<2>(block, first, n, dim, rule, hides, rows, lane);
  } else if (count - lane > 0) {
    attend_lanes<1>(block, first, n, dim, rule, hides, rows, lane);
  }
}

// Merge the state of `other` into `rows` and clear it. An empty state changes no bit.
inline void merge(const QueryRows& rows, const QueryRows& other, int64_t dim) {
  for (int64_t r = 0; r < kRoundedRows; r += W) {
    const vf before = load(rows.top + r), here = load(other.top + r), now = max(before, here);
    const vf ours = exp(mul(sub(before, now), set1(kLn2))), theirs = exp(mul(sub(here, now), set1(kLn2)));
    store(rows.top + r, now);
    store(rows.sum + r, fma(load(rows.sum + r), ours, mul(load(other.sum + r), theirs)));
    for (int64_t at = r; at < dim * kRoundedRows; at += kRoundedRows) {
      store(rows.acc + at, fma(load(rows.acc + at), ours, mul(load(other.acc + at), theirs)));
      store(other.acc + at, zero());
    }
    store(other.top + r, set1(kLowest));
    store(other.sum + r, zero());
  }
}

// out[r][d] = acc[d][r] / sum[r].
inline void settle(const QueryRows& rows, int64_t count, int64_t dim, float* const* out) {
  for (int64_t first = 0; first < count; first += W) {
    const vf share = div(set1(1.0f), load(rows.sum + first));
    for (int64_t d = 0; d < dim; d += W) {
      vf square[W];
      for (int i = 0; i < W; ++i) square[i] = mul(load(rows.acc + (d + i) * kRoundedRows + first), share);
      transpose(square);
      for (int r = 0; r < W && first + r < count; ++r) store(out[first + r] + d, square[r]);
    }
  }
}

}  // namespace headrace::HEADRACE_ISA
