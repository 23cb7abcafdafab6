// Activations in block floating point, to be multiplied with 2-, 4-, 5-, 6- and 8-bit weights as 16- or 8-bit integers.
//
// The values of one group share a scale; weights stay the stored integers. One instruction multiplies and adds two or four values per
// lane. The result is the exact product with the rounded activations. Infinities and NaN come out as NaN.
//
// 16 bits: the scale is the largest magnitude / 32767, so that a value moves by at most the 65534th part of it. 8 bits: the largest
// magnitude / 127; but in some groups the largest (an outlier) has four bits more, so that the scale is the second largest / 127, or
// the largest / 2032 if that is more. runtime.ops.reference.rounded_to_bytes defines it in Python.
//
// bands.cpp reads these rows. Guard: runtime/native/tests/projections.cpp; tests/runtime/ops/test_coarse_activations.py compares 8 bits
// with the definition.
#pragma once

#include <utility>

#include "weights.h"

namespace headrace::HEADRACE_ISA {

// The layout of a row of rounded activations: for every dword of weights kWords words, each in the room of a float; then the scale
// of every group; then the sum of every group's rounded values, or for symmetric weights the integer at which products begin: minus
// the sum of the rounded integers times that of a weight of 0.
template <class Own>
struct Rounded {
  static int64_t groups(const Matrix& w) { return w.k / Own::group(w); }
  static int64_t scales_at(const Matrix& w) { return w.k / Own::kEach; }
  static int64_t sums_at(const Matrix& w) { return scales_at(w) + groups(w); }
  static int64_t size(const Matrix& w) { return round_up(sums_at(w) + groups(w), 16); }
};

constexpr int kOutlierBits = 4;     // that an outlier of 8-bit activations has beyond 8
constexpr int64_t kOutlierRun = 16; // groups, of which those with the largest magnitudes have outliers
constexpr int64_t kOutlierShare = 8;  // groups for each outlier

// 16 bits: word s has values s and s + kWords of the dword's. Groups are those of the weights.
template <class Format>
struct Pairs : Rounded<Pairs<Format>> {
  using F = Format;
  static constexpr int kEach = 2;
  static constexpr int kWords = F::kSteps / kEach;
  static constexpr bool kInSlabs = true;  // for many rows, see bands.cpp

  static int64_t group(const Matrix& w) { return w.group; }
  static vi take(vi words, int step) { return F::take(words, step); }
  static vi dot(vi acc, vi weights, vi x) { return dot_pairs(acc, weights, x); }
  // Sums of one group from 0 on, and their dwords.
  static vi dot_in_group(vi acc, vi weights, vi x) { return dot(acc, weights, x); }
  static vi group_sum(vi sum) { return sum; }
};

// 8 bits: word s has value s of each of the dword's bytes. Groups are of 32 values at most. Of an outlier a byte has the low part, from
// -128 to 127. Behind the sums, of every outlier: its high part, a number of the row; its dword of weights, as an offset in a band; its
// weight's first bit in there; its scale of weights, as an offset in a band.
template <class Format>
struct Quads : Rounded<Quads<Format>> {
  using F = Format;
  static constexpr int kEach = 4;
  static constexpr int kWords = F::kSteps / kEach;
  static constexpr bool kInSlabs = F::kBits != 8;  // whose words are bytes as they are

  static int64_t group(const Matrix& w) { return w.group < 32 ? w.group : 32; }
  static int64_t outliers(const Matrix& w) { return ceil_div(Rounded<Quads>::groups(w), kOutlierShare); }
  static int64_t size(const Matrix& w) {
    return round_up(w.k / kEach + 2 * Rounded<Quads>::groups(w) + 4 * outliers(w), 16);
  }
  static vi take(vi words, int step) { return F::take_four(words, step); }
  static vi dot(vi acc, vi weights, vi x) { return dot_quads<F::kLargest>(acc, weights, x); }
  static vi dot_in_group(vi acc, vi weights, vi x) { return HEADRACE_ISA::dot_in_group<F::kLargest>(acc, weights, x); }
  static vi group_sum(vi sum) { return HEADRACE_ISA::group_sum<F::kLargest>(sum); }
};

// The numbers of a and b, side by side, in runs of Run: those of every other run, from the run `Odd` on.
template <int Run, int Odd, int... Lane>
inline vf every_other(vf a, vf b, std::integer_sequence<int, Lane...>) {
  return __builtin_shufflevector(a, b, (Lane / Run * 2 * Run + Odd * Run + Lane % Run)...);
}

// out: `count` values, times `factor` and rounded, as pairs. The lanes of the result add up to their sum.
template <int Run>
inline vf round_values(const float* x, int64_t count, float factor, float* out) {
  constexpr int kApart = Run < W ? W : Run;  // from the vector with the first of a pair to that with the second
  vf total = zero();
  int64_t i = 0;
  for (; i + 2 * kApart <= count; i += 2 * kApart) {
    for (int j = 0; j < kApart; j += W) {
      const vf a = round_even(mul(load(x + i + j), set1(factor)));
      const vf b = round_even(mul(load(x + i + j + kApart), set1(factor)));
      total = add(total, add(a, b));
      if constexpr (Run < W) {
        const std::make_integer_sequence<int, W> lanes;
        store_words(out + i / 2, join_pairs(every_other<Run, 0>(a, b, lanes), every_other<Run, 1>(a, b, lanes)));
      } else {
        store_words(out + i / 2 + j, join_pairs(a, b));
      }
    }
  }
  if constexpr (Run < W) {
    if (i < count) {  // groups of 16, on AVX-512: one vector has both values of its pairs
      const vf a = round_even(mul(load(x + i), set1(factor)));
      const std::make_integer_sequence<int, W> lanes;
      const vi words = join_pairs(every_other<Run, 0>(a, a, lanes), every_other<Run, 1>(a, a, lanes));
      store_first(out + i / 2, (vf)words, W / 2);
      return add(total, a);
    }
  }
  return total;
}

inline vf magnitude(vf v) { return max(v, sub(zero(), v)); }

// The largest magnitude of a group of values in any lane, at least 1e-30. Adds 0 to `spoiled`, NaN for non-finite values.
inline vf largest_lanes(const float* x, int64_t group, vf& spoiled) {
  vf top = set1(1e-30f);
  for (int64_t i = 0; i < group; i += W) {
    const vf v = load(x + i);
    top = max(top, magnitude(v));
    spoiled = add(spoiled, sub(v, v));
  }
  return top;
}

inline float largest(const float* x, int64_t group, vf& spoiled) { return maximum(largest_lanes(x, group, spoiled)); }

// Lane i of the result is the largest of v[i].
inline vf maxima(vf (&v)[W]) {
  transpose(v);
  for (int apart = W / 2; apart > 0; apart /= 2) {
    for (int i = 0; i < apart; ++i) v[i] = max(v[i], v[i + apart]);
  }
  return v[0];
}

// Lane i: the largest and the second largest of v[i].
struct Largest {
  vf first, second;
};
inline Largest two_maxima(vf (&v)[W]) {
  transpose(v);
  vf second[W / 2];
  for (int i = 0; i < W / 2; ++i) {
    second[i] = min(v[i], v[i + W / 2]);
    v[i] = max(v[i], v[i + W / 2]);
  }
  for (int apart = W / 4; apart > 0; apart /= 2) {
    for (int i = 0; i < apart; ++i) {
      second[i] = max(min(v[i], v[i + apart]), max(second[i], second[i + apart]));
      v[i] = max(v[i], v[i + apart]);
    }
  }
  return {v[0], second[0]};
}

// Lane i of the result is the largest() of group i of `count`.
inline vf largest_of_each(const float* x, int64_t group, int64_t count, vf& spoiled) {
  vf tops[W];
  for (int i = 0; i < W; ++i) tops[i] = i < count ? largest_lanes(x + i * group, group, spoiled) : zero();
  return maxima(tops);
}

// The sums of W groups as they are stored, from those of their integers, which are exact: below 2^24.
inline vf stored_sums(const Matrix& w, vf scale, vf whole) {
  return w.symmetric() ? (vf)to_whole(mul(whole, set1(-static_cast<float>(1 << (w.bits - 1))))) : mul(scale, whole);
}

// 16 bits: out (Pairs<F>::size) from x (K), W groups at a time.
template <class F>
inline void round_row(const Matrix& w, const float* x, float* out) {
  using X = Pairs<F>;
  const int64_t groups = w.groups();
  float *scales = out + X::scales_at(w), *sums_to = out + X::sums_at(w);
  vf spoiled = zero();
  for (int64_t first = 0; first < groups; first += W) {
    const int64_t here = groups - first < W ? groups - first : W;
    const vf top = largest_of_each(x + first * w.group, w.group, here, spoiled), scale = div(top, set1(32767));
    alignas(64) float factors[W];
    store(factors, div(set1(32767), top));
    vf totals[W] = {};
    for (int64_t i = 0; i < here; ++i) {
      const int64_t at = (first + i) * w.group;
      totals[i] = round_values<X::kWords>(x + at, w.group, factors[i], out + at / 2);
    }
    store_first(scales + first, scale, here);
    store_first(sums_to + first, stored_sums(w, scale, sums(totals)), here);
  }
  scales[0] += sum(spoiled);  // which is in every product
}

// 16 values in the order of Quads: byte j of word s is value j * kWords + s of those of a dword.
template <int Words, int... Byte>
inline void order_bytes(const int8_t* from, float* out, std::integer_sequence<int, Byte...>) {
  typedef int8_t Bytes __attribute__((vector_size(16)));
  Bytes v;
  __builtin_memcpy(&v, from, sizeof v);
  v = __builtin_shufflevector(v, v, (Byte / (4 * Words) * (4 * Words) + Byte % 4 * Words + Byte / 4 % Words)...);
  __builtin_memcpy(out, &v, sizeof v);
}

// out: the low bytes of a group's values times `factor`, rounded. The lanes of the result add up to the sum of the rounded values.
template <int Words>
inline vf round_bytes(const float* x, int64_t group, float factor, float* out) {
  vf total = zero();
  alignas(16) int8_t bytes[32];
  for (int64_t i = 0; i < group; i += W) {
    const vf whole = round_even(mul(load(x + i), set1(factor)));
    total = add(total, whole);
    store_bytes(bytes + i, to_whole(whole));
  }
  for (int64_t i = 0; i < group; i += 16) order_bytes<Words>(bytes + i, out + i / 4, std::make_integer_sequence<int, 16>{});
  return total;
}

// The first of `count` numbers that is `x`; 0 if NaN hides it. Numbers come in vectors, value(i).
template <class Value>
inline int64_t place_of(int64_t count, float x, const Value& value) {
  uint32_t lanes = 0;
  for (int64_t i = 0; i < count; i += W) lanes |= lanes_with(value(i), x) << i;
  const int64_t at = lanes == 0 ? 0 : __builtin_ctz(lanes);
  return at < count ? at : 0;
}

// W lanes from `i` on, of which lane `at` is 1 and the others are 0; both are below 32.
inline vf one_at(int64_t at, int64_t i) {
  static constexpr auto kLanes = [] {
    struct {
      float number[96];
    } lanes{};
    lanes.number[32] = 1;
    return lanes;
  }();
  return load(kLanes.number + 32 - at + i);
}

// The second largest magnitude of a group, of which value `at` has the largest; `other`: the second largest of W lanes' maxima.
inline float second_largest(const float* x, int64_t group, int64_t at, float other) {
  for (int64_t i = at % W; i < group; i += W) {
    const float v = __builtin_fabsf(x[i]);
    if (i != at && v > other) other = v;
  }
  return other;
}

// Writes outlier `number`, which is value `at` of the row, `v` before it was scaled and rounded.
template <class X>
inline void write_outlier(const Matrix& w, float v, float factor, float scale, int64_t at, int64_t number, float* out) {
  using F = typename X::F;
  const int64_t count = X::outliers(w), in_dword = at % F::kSteps;
  float* entry = out + X::sums_at(w) + X::groups(w) + number;
  const float rounded = __builtin_rintf(v * factor);
  const int whole = __builtin_fabsf(rounded) < 4096 ? static_cast<int>(rounded) : 0;  // NaN is in the scales
  const auto put = [&](int64_t part, int64_t word) {
    const auto narrow = static_cast<uint32_t>(word);
    __builtin_memcpy(entry + part * count, &narrow, sizeof narrow);
  };
  entry[0] = static_cast<float>(whole - static_cast<int8_t>(whole)) * scale;
  put(1, at / F::kSteps * kBand);
  put(2, in_dword * F::kBits);
  put(3, at / w.group * kBand);
}

// 8 bits: out (Quads<F>::size) from x (K), kOutlierRun groups at a time. In four steps: each group's two largest magnitudes; the groups
// with outliers, those with the largest; scales, and all values rounded; the outliers' high parts.
template <class F>
inline void round_row_coarsely(const Matrix& w, const float* x, float* out) {
  using X = Quads<F>;
  const int64_t group = X::group(w), groups = X::groups(w);
  float *scales = out + X::scales_at(w), *sums_to = out + X::sums_at(w);
  vf spoiled = zero();
  for (int64_t first = 0; first < groups; first += kOutlierRun) {
    const int64_t here = groups - first < kOutlierRun ? groups - first : kOutlierRun, outliers = ceil_div(here, kOutlierShare);
    alignas(64) float peaks[kOutlierRun], seconds[kOutlierRun], factors[kOutlierRun];
    vf left[kOutlierRun / W], totals[kOutlierRun];  // magnitudes of groups without outliers so far
    for (int64_t i = 0; i < kOutlierRun; i += W) {
      vf lanes[W];
      for (int64_t j = 0; j < W; ++j) {
        lanes[j] = i + j < here ? largest_lanes(x + (first + i + j) * group, group, spoiled) : zero();
      }
      const Largest most = two_maxima(lanes);
      left[i / W] = most.first;
      store(peaks + i, most.first);
      store(seconds + i, most.second);
    }
    int64_t chosen[kOutlierRun / kOutlierShare], places[kOutlierRun / kOutlierShare];  // groups with outliers, and these
    for (int64_t n = 0; n < outliers; ++n) {
      vf most = left[0];
      for (int64_t i = 1; i < kOutlierRun / W; ++i) most = max(most, left[i]);
      const int64_t best = place_of(here, maximum(most), [&](int64_t i) { return left[i / W]; });
      for (int64_t i = 0; i < kOutlierRun; i += W) left[i / W] = sub(left[i / W], mul(left[i / W], one_at(best, i)));
      const float* values = x + (first + best) * group;
      const int64_t at = place_of(group, peaks[best], [&](int64_t i) { return magnitude(load(values + i)); });
      const float second = second_largest(values, group, at, seconds[best]), high = peaks[best] / (1 << kOutlierBits);
      peaks[best] = second > high ? second : high;
      chosen[n] = best;
      places[n] = (first + best) * group + at;
    }
    for (int64_t i = 0; i < here; i += W) {
      const vf peak = load(peaks + i);
      store(factors + i, div(set1(127), peak));
      store_first(scales + first + i, div(peak, set1(127)), here - i < W ? here - i : W);
    }
    for (int64_t i = 0; i < kOutlierRun; ++i) {
      const int64_t at = (first + i) * group;
      totals[i] = i < here ? round_bytes<X::kWords>(x + at, group, factors[i], out + at / X::kEach) : zero();
    }
    for (int64_t n = 0; n < outliers; ++n) {
      write_outlier<X>(w, x[places[n]], factors[chosen[n]], scales[first + chosen[n]], places[n], first / kOutlierShare + n, out);
    }
    for (int64_t i = 0; i < here; i += W) {
      vf some[W];
      for (int j = 0; j < W; ++j) some[j] = totals[i + j];
      const int64_t lanes = here - i < W ? here - i : W;
      store_first(sums_to + first + i, stored_sums(w, load_first(scales + first + i, lanes), sums(some)), lanes);
    }
  }
  scales[0] += sum(spoiled);
}

}  // namespace headrace::HEADRACE_ISA
