// Attention with both products in 16-bit integers: twice as many multiply-adds per instruction as in float32.
//
// A lane belongs to a query; keys and values are broadcast pair by pair, so nothing is summed across lanes. Inputs come from
// round_attention.h. An entry's contribution, its softmax weight times the power of two of its value, is rounded to 15 bits of the
// largest in its block, or 1 / 2^18 of the block's sum if that is more (times 2^13: 2^31). Rounding relative to the weight alone would
// lose the other entries beside an attention sink, which has nearly all the weight and a small value.
//
// Layouts of queries and entries: QueryRows and EntryBlock (core/kernels.h). core/attend_rounded.cpp is the caller.
// Guard: runtime/native/tests/attention.cpp, with the error bounds of attention_bounds.h.
#pragma once

#include "attention.h"
#include "round_attention.h"

namespace headrace::HEADRACE_ISA {

// Sums of each vector of queries at once, limited by registers: for scores of kMeet entries, for values of kMeet
// numbers of the head.
constexpr int kMeet = W == 16 ? 8 : 4;
constexpr float kWeightSum = 262000.0f;  // and half a unit more for each entry: times 8191 less than 2^31
constexpr float kUnseen = -1e38f;        // score of masked entries: below kLowest, so without weight
constexpr float kLn2 = 0.693147181f;
static_assert(kRoundedEntries % kMeet == 0 && kMeet % 2 == 0);

// Nothing beside products.
struct Nothing {
  void operator()(int64_t) const {}
};

// acc[m][r] = sum over `depth` steps of pair m of `broadcast` (step, m) times vector r of a row, given by row(step, r). Between steps
// come beside(from), ..., beside(from + kMeet - 1): work for units that products leave idle.
template <int R, class Row, class Beside>
[[gnu::always_inline]] inline void meet_pairs(const float* broadcast, int64_t step, int64_t apart, int64_t depth, const Row& row,
                                              int64_t from, const Beside& beside, vi (&acc)[kMeet][R]) {
  for (int m = 0; m < kMeet; ++m) {
    for (int r = 0; r < R; ++r) acc[m][r] = vi{};
  }
  constexpr int kParts = std::is_same_v<Beside, Nothing> ? 1 : kMeet;
  int64_t i = 0;
  for (int part = 1; part <= kParts; ++part) {
    for (const int64_t end = part * depth / kParts; i < end; ++i) {
      vi y[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) y[r] = row(i, r);
#pragma GCC unroll 8
      for (int m = 0; m < kMeet; ++m) {
        const vi x = set1_word(broadcast + i * step + m * apart);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) acc[m][r] = dot_pairs(acc[m][r], x, y[r]);
      }
    }
    beside(from + part - 1);
  }
}

// R vectors of queries on their way through a block.
template <int R>
struct Lanes {
  alignas(64) float scores[kRoundedEntries * R * W];  // (entry, lane), later their powers of two
  alignas(64) float top[R * W];    // of the scores
  alignas(64) float total[R * W];  // of the powers
  alignas(64) float sum[R * W];    // of softmax weights
  const QueryRows* rows = nullptr;
  int64_t entries = 0;  // padded to kMeet
};

// Scores of a block's entries, with the exponents of their values. beside(key) as in meet_pairs.
template <int R, class Beside>
inline void rounded_scores(const EntryBlock& block, int64_t dim, const Beside& beside, Lanes<R>& lanes) {
  const int64_t stride = round_up(dim / 2, W);
  for (int r = 0; r < R; ++r) {
    store(lanes.top + r * W, set1(kLowest));
    store(lanes.total + r * W, zero());
    store(lanes.sum + r * W, zero());
  }
  for (int64_t key = 0; key < lanes.entries; key += kMeet) {
    vi dots[kMeet][R];
    const auto row = [&](int64_t i, int r) {
      return load_words(reinterpret_cast<const uint32_t*>(lanes.rows->words + i * kRoundedRows + r * W));
    };
    meet_pairs<R>(block.keys + key * stride, 1, stride, dim / 2, row, key, beside, dots);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      vf top = load(lanes.top + r * W);
      const vf scale = load(lanes.rows->scales + r * W);
#pragma GCC unroll 8
      for (int m = 0; m < kMeet; ++m) {
        const vf key_scale = times_power(scale, set1(block.key_scales[key + m]));
        const vf score = fma(to_float(dots[m][r]), key_scale, set1(block.value_exponents[key + m]));
        store(lanes.scores + ((key + m) * R + r) * W, score);
        top = max(top, score);
      }
      store(lanes.top + r * W, top);
    }
  }
}

// Soft-cap the scores of n entries and mask later ones, those before a query's first, and padding.
template <int R>
inline void bend_and_hide(const EntryBlock& block, int64_t first, int64_t n, const ScoreRule& rule, bool hides, Lanes<R>& lanes) {
  const QueryRows& rows = *lanes.rows;
  // All lanes see the entries before the first lane's own, unless the last one begins behind the block's first.
  int64_t plain = hides ? static_cast<int64_t>(rows.positions[0]) - first : n;
  if (plain < 0 || rule.softcap > 0 || rows.firsts[R * W - 1] > static_cast<float>(first)) plain = 0;
  if (plain > n) plain = n;
  for (int r = 0; r < R; ++r) {
    vf top = set1(kLowest);
    const vf position = load(rows.positions + r * W), earliest = load(rows.firsts + r * W);
    for (int64_t key = 0; key < plain; ++key) top = max(top, load(lanes.scores + (key * R + r) * W));
    for (int64_t key = plain; key < n; ++key) {
      float* at = lanes.scores + (key * R + r) * W;
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
      top = max(top, score);
    }
    store(lanes.top + r * W, top);
    for (int64_t key = n; key < lanes.entries; ++key) store(lanes.scores + (key * R + r) * W, set1(kUnseen));
  }
}

// The scores of one entry become powers of two, relative to each lane's highest.
template <int R>
[[gnu::always_inline]] inline void raise_scores(const EntryBlock& block, int64_t key, Lanes<R>& lanes) {
  const vf share = set1(block.value_shares[key]);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    float* at = lanes.scores + (key * R + r) * W;
    const vf e = exp2_roughly(sub(load(at), load(lanes.top + r * W)));
    store(at, e);
    store(lanes.total + r * W, add(load(lanes.total + r * W), e));
    store(lanes.sum + r * W, fma(e, share, load(lanes.sum + r * W)));  // the softmax weight alone
  }
}

// Add values, times powers of scores rounded to pairs, to the sums; advance tops and sums.
template <int R>
inline void add_values(const EntryBlock& block, int64_t dim, const Lanes<R>& lanes) {
  alignas(64) float weights[kRoundedEntries / 2 * R * W];  // pairs (entry / 2, lane)
  const QueryRows& rows = *lanes.rows;
  vf factor[R];
  alignas(64) float shrinks[R * W], units[R * W];  // factor of the sums so far; value of 1 times 1 beside the new ones
  for (int r = 0; r < R; ++r) {
    const int64_t at = r * W;
    const vf top = load(lanes.top + r * W);
    factor[r] = min(set1(kLargest), div(set1(kWeightSum), load(lanes.total + r * W)));  // in the order that keeps NaN
    const vf before = load(rows.top + at), now = max(before, top);
    const vf shrink = exp(mul(sub(before, now), set1(kLn2))), here = exp(mul(sub(top, now), set1(kLn2)));
    store(shrinks + r * W, shrink);
    store(units + r * W, div(mul(here, set1(0x1p-12f)), factor[r]));
    store(rows.top + at, now);
    store(rows.sum + at, fma(load(rows.sum + at), shrink, mul(load(lanes.sum + r * W), here)));
  }
  const auto add_columns = [&](int64_t d, const auto& row) __attribute__((always_inline)) {
    vi dots[kMeet][R];
    meet_pairs<R>(block.values + d, dim, 1, lanes.entries / 2, row, 0, Nothing{}, dots);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const vf shrink = load(shrinks + r * W), unit = load(units + r * W);
#pragma GCC unroll 8
      for (int m = 0; m < kMeet; ++m) {
        float* acc = rows.acc + (d + m) * kRoundedRows + r * W;
        store(acc, fma(load(acc), shrink, mul(to_float(dots[m][r]), unit)));
      }
    }
  };
  add_columns(0, [&](int64_t i, int r) __attribute__((always_inline)) {
    const float* at = lanes.scores + (2 * i * R + r) * W;
    const vi pair = join_pairs(mul(load(at), factor[r]), mul(load(at + R * W), factor[r]));
    store_words(weights + (i * R + r) * W, pair);
    return pair;
  });
  for (int64_t d = kMeet; d < dim; d += kMeet) {
    add_columns(d, [&](int64_t i, int r) { return load_words(reinterpret_cast<const uint32_t*>(weights + (i * R + r) * W)); });
  }
}

// Scores of a meeting's lanes.
template <int R, class Beside>
inline void score_lanes(const EntryBlock& block, int64_t first, int64_t dim, const ScoreRule& rule, const Meeting& meeting,
                        const Beside& beside, Lanes<R>& lanes) {
  lanes.rows = &meeting.rows;
  lanes.entries = round_up(meeting.n, kMeet);
  rounded_scores<R>(block, dim, beside, lanes);
  if (meeting.hides || rule.softcap > 0 || lanes.entries > meeting.n) {
    bend_and_hide<R>(block, first, meeting.n, rule, meeting.hides, lanes);
  }
}

template <int R>
inline void finish_lanes(const EntryBlock& block, int64_t from, int64_t dim, Lanes<R>& lanes) {
  for (int64_t key = from; key < lanes.entries; ++key) raise_scores<R>(block, key, lanes);
  add_values<R>(block, dim, lanes);
}

template <int R>
inline void attend_few(const EntryBlock& block, int64_t first, int64_t dim, const ScoreRule& rule, const Meeting& meeting) {
  Lanes<R> lanes;
  score_lanes<R>(block, first, dim, rule, meeting, Nothing{}, lanes);
  finish_lanes<R>(block, 0, dim, lanes);
}

// Attend to a block at position `first`. A QueryRows' powers are taken between the products of the next one's scores.
inline void attend_rounded(const EntryBlock& block, int64_t first, int64_t dim, ScoreRule rule, const Meeting* meetings,
                           int64_t count) {
  Lanes<kRowVectors> both[2];
  Lanes<kRowVectors>* before = nullptr;
  for (int64_t i = 0; i < count; ++i) {
    const Meeting& meeting = meetings[i];
    if (kRowVectors > 2 && meeting.count <= 2 * W && meeting.count > W) {
      attend_few<2>(block, first, dim, rule, meeting);
    } else if (meeting.count <= W) {
      attend_few<1>(block, first, dim, rule, meeting);
    } else if (before == nullptr) {
      before = &both[0];
      score_lanes<kRowVectors>(block, first, dim, rule, meeting, Nothing{}, *before);
    } else {
      Lanes<kRowVectors>& last = *before;
      before = before == both ? both + 1 : both;
      const auto raise = [&](int64_t key) __attribute__((always_inline)) {
        if (key < last.entries) raise_scores<kRowVectors>(block, key, last);
      };
      score_lanes<kRowVectors>(block, first, dim, rule, meeting, raise, *before);
      finish_lanes<kRowVectors>(block, before->entries, dim, last);
    }
  }
  if (before != nullptr) finish_lanes<kRowVectors>(block, 0, dim, *before);
}

// Merge the state of `other` into `rows` and clear it. An empty state changes at most the sign of a zero: -0 + 0 is +0.
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
