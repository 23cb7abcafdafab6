// Activations in block floating point, to be multiplied with 2-, 4- and 8-bit weights as 16- or 8-bit integers.
//
// The values of one group share a scale; weights stay the stored integers. One instruction multiplies and adds two or four values per
// lane. The result is the exact product with the rounded activations. Infinities and NaN come out as NaN.
//
// 16 bits: the scale is the largest magnitude / 32767, so that a value moves by at most the 65534th part of it. 8 bits: the largest
// magnitude / 127; but in some groups the largest (an outlier) has four bits more, so that the scale is the second largest / 127, or
// the largest / 2032 if that is more. runtime.ops.reference.rounded_to_bytes defines it in Python.
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
constexpr int64_t kOutlierRun = 16; // groups, a quarter of which have outliers: those with the largest magnitudes

// 16 bits: word s has values s and s + kWords of the dword's. Groups are those of the weights.
template <class Format>
struct Pairs : Rounded<Pairs<Format>> {
  using F = Format;
  static constexpr int kEach = 2;
  static constexpr int kWords = F::kSteps / kEach;

  static int64_t group(const Matrix& w) { return w.group; }
  static vi take(vi words, int step) { return F::take(words, step); }
  static vi dot(vi acc, vi weights, vi x) { return dot_pairs(acc, weights, x); }
};

// 8 bits: word s has value s of each of the dword's bytes. Groups are of 32 values at most. Behind the sums, of every outlier: the
// scale of its high part; this part in its byte of a word of zeros; that word's dword of weights, as an offset in a band; its first bit;
// its scale of weights, as an offset in a band.
template <class Format>
struct Quads : Rounded<Quads<Format>> {
  using F = Format;
  static constexpr int kEach = 4;
  static constexpr int kWords = F::kSteps / kEach;

  static int64_t group(const Matrix& w) { return w.group < 32 ? w.group : 32; }
  static int64_t outliers(const Matrix& w) { return ceil_div(Rounded<Quads>::groups(w), 4); }
  static int64_t size(const Matrix& w) {
    return round_up(w.k / kEach + 2 * Rounded<Quads>::groups(w) + 5 * outliers(w), 16);
  }
  static vi take(vi words, int step) { return F::take_four(words, step); }
  static vi dot(vi acc, vi weights, vi x) { return dot_quads<F::kBits>(acc, weights, x); }
  static vi take_from(vi words, const float* bit) {
    if constexpr (kWords > 1) words = shift_right_by(words, bit);
    return F::take_four(words, 0);
  }
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
  float rest = 0;
  for (; i < count; i += 2 * Run) {  // groups of 16, narrower than a vector
    for (int j = 0; j < Run; ++j) {
      const auto whole = [&](int64_t at) {
        const float v = __builtin_rintf(x[at] * factor);
        rest += v;
        return static_cast<uint32_t>(static_cast<int32_t>(v == v ? v : 0.0f));  // NaN is in the scales, see round_row
      };
      const uint32_t low = whole(i + j), pair = (low & 0xffff) | whole(i + j + Run) << 16;
      __builtin_memcpy(out + i / 2 + j, &pair, sizeof pair);
    }
  }
  return rest == 0 ? total : add(total, load_first(&rest, 1));
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

// out: a group's values, given by value(i), over their scale, rounded. The lanes of the result add up to their sum.
template <int Words, class Value>
inline vf round_bytes(int64_t group, float factor, float* out, const Value& value) {
  vf total = zero();
  alignas(16) int8_t bytes[32];
  for (int64_t i = 0; i < group; i += W) {
    const vf whole = round_even(mul(value(i), set1(factor)));
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

// Group g of a row whose largest magnitude `top` is an outlier, the `number`th; the sum of what it is rounded to, in any lane.
template <class X>
inline vf round_outlier(const Matrix& w, const float* x, int64_t g, float top, int64_t number, float* out) {
  using F = typename X::F;
  const int64_t group = X::group(w), count = X::outliers(w);
  float *scales = out + X::scales_at(w), *entry = out + X::sums_at(w) + X::groups(w) + number;
  x += g * group;
  const int64_t at = place_of(group, top, [&](int64_t i) { return magnitude(load(x + i)); });
  const auto others = [&](int64_t i) { return sub(load(x + i), mul(load(x + i), one_at(at, i))); };
  vf seconds = zero();
  for (int64_t i = 0; i < group; i += W) seconds = max(seconds, magnitude(others(i)));
  const float high = top / (1 << kOutlierBits), second = maximum(seconds), peak = second > high ? second : high;
  const float factor = 127 / peak, whole = __builtin_rintf(x[at] * factor), step = 1 << kOutlierBits;
  const float upper = __builtin_rintf(whole / step), scale = peak / 127;
  const vf lower = set1((whole - step * upper) * scale);  // rounded to what it is
  scales[g] = scale;
  const vf total = round_bytes<X::kWords>(group, factor, out + g * group / X::kEach,
                                          [&](int64_t i) { return fma(lower, one_at(at, i), others(i)); });
  const auto put = [&](int64_t part, int64_t word) {
    const auto narrow = static_cast<uint32_t>(word);
    __builtin_memcpy(entry + part * count, &narrow, sizeof narrow);
  };
  const int64_t value = g * group + at, in_dword = value % F::kSteps;
  const auto byte = static_cast<uint8_t>(upper == upper ? static_cast<int>(upper) : 0);  // NaN is in the scales
  entry[0] = scale * step;
  put(1, static_cast<int64_t>(byte) << (8 * (in_dword / X::kWords)));
  put(2, value / F::kSteps * kBand);
  put(3, in_dword % X::kWords * F::kBits);
  put(4, value / w.group * kBand);
  const float upper_sum = step * upper;
  return add(total, load_first(&upper_sum, 1));
}

template <class F>
inline void round_row_coarsely(const Matrix& w, const float* x, float* out) {
  using X = Quads<F>;
  const int64_t group = X::group(w), groups = X::groups(w);
  float *scales = out + X::scales_at(w), *sums_to = out + X::sums_at(w);
  vf spoiled = zero();
  for (int64_t first = 0; first < groups; first += kOutlierRun) {
    const int64_t here = groups - first < kOutlierRun ? groups - first : kOutlierRun;
    alignas(64) float tops[kOutlierRun], factors[kOutlierRun];
    vf left[kOutlierRun / W], totals[kOutlierRun];  // magnitudes of groups without outliers so far
    for (int64_t i = 0; i < kOutlierRun; i += W) {
      const vf top = largest_of_each(x + (first + i) * group, group, here - i, spoiled);
      left[i / W] = top;
      store(tops + i, top);
      store(factors + i, div(set1(127), top));
      if (i < here) store_first(scales + first + i, div(top, set1(127)), here - i < W ? here - i : W);
    }
    uint32_t chosen = 0;
    for (int64_t n = 0; n < (here + 3) / 4; ++n) {
      vf most = left[0];
      for (int64_t i = 1; i < kOutlierRun / W; ++i) most = max(most, left[i]);
      const int64_t best = place_of(here, maximum(most), [&](int64_t i) { return left[i / W]; });
      for (int64_t i = 0; i < kOutlierRun; i += W) left[i / W] = sub(left[i / W], mul(left[i / W], one_at(best, i)));
      chosen |= 1u << best;
      totals[best] = round_outlier<X>(w, x, first + best, tops[best], first / 4 + n, out);
    }
    for (int64_t i = 0; i < kOutlierRun; ++i) {
      if (i >= here) totals[i] = zero();
      if (i >= here || (chosen >> i & 1) != 0) continue;
      const int64_t at = (first + i) * group;
      totals[i] = round_bytes<X::kWords>(group, factors[i], out + at / X::kEach, [&](int64_t j) { return load(x + at + j); });
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
