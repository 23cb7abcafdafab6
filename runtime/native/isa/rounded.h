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
// of every group; then the sum of every group's rounded values.
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

// out: `count` values, times `factor` and rounded, as pairs. Returns their sum.
template <int Run>
inline float round_values(const float* x, int64_t count, float factor, float* out) {
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
        return static_cast<uint32_t>(static_cast<int32_t>(v == v ? v : 0.0f));  // NaN is in the sums, see round_row
      };
      const uint32_t low = whole(i + j), pair = (low & 0xffff) | whole(i + j + Run) << 16;
      __builtin_memcpy(out + i / 2 + j, &pair, sizeof pair);
    }
  }
  return sum(total) + rest;
}

// The largest magnitude of a group of values, at least 1e-30. Adds 0 to `spoiled`, NaN for non-finite values.
inline float largest(const float* x, int64_t group, vf& spoiled) {
  vf top = set1(1e-30f);
  for (int64_t i = 0; i < group; i += W) {
    const vf v = load(x + i);
    top = max(top, max(v, sub(zero(), v)));
    spoiled = add(spoiled, sub(v, v));
  }
  return maximum(top);
}

template <class F>
inline void round_row(const Matrix& w, const float* x, float* out) {
  using X = Pairs<F>;
  float* scales = out + X::scales_at(w);
  float* sums = out + X::sums_at(w);
  vf spoiled = zero();
  for (int64_t g = 0; g < w.groups(); ++g) {
    const float* from = x + g * w.group;
    const float top = largest(from, w.group, spoiled);
    scales[g] = top / 32767;
    sums[g] = scales[g] * round_values<X::kWords>(from, w.group, 32767 / top, out + g * w.group / 2);
  }
  sums[0] += sum(spoiled);  // which is in every product
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

// out: a group's values over their scale, rounded. Returns their sum.
template <int Words>
inline float round_bytes(const float* x, int64_t group, float factor, float* out) {
  vf total = zero();
  alignas(16) int8_t bytes[32];
  for (int64_t i = 0; i < group; i += W) {
    const vf whole = round_even(mul(load(x + i), set1(factor)));
    total = add(total, whole);
    store_bytes(bytes + i, to_whole(whole));
  }
  for (int64_t i = 0; i < group; i += 16) order_bytes<Words>(bytes + i, out + i / 4, std::make_integer_sequence<int, 16>{});
  return sum(total);
}

// The first place of a group's value of magnitude `top`; 0 if NaN hides it.
inline uint32_t place_of(const float* x, int64_t group, float top) {
  for (int64_t i = 0; i < group; i += W) {
    const vf v = load(x + i);
    const uint32_t lanes = lanes_with(max(v, sub(zero(), v)), top);
    if (lanes != 0) return static_cast<uint32_t>(i) + static_cast<uint32_t>(__builtin_ctz(lanes));
  }
  return 0;
}

// Group g of a row whose largest magnitude `top` is an outlier, the `number`th.
template <class X>
inline void round_outlier(const Matrix& w, const float* x, int64_t g, float top, int64_t number, float* out) {
  using F = typename X::F;
  const int64_t group = X::group(w), count = X::outliers(w);
  float *scales = out + X::scales_at(w), *sums = out + X::sums_at(w), *entry = sums + X::groups(w) + number;
  alignas(64) float values[32];
  __builtin_memcpy(values, x + g * group, static_cast<size_t>(group) * sizeof(float));
  const uint32_t at = place_of(values, group, top);
  const float outlier = values[at], high = top / (1 << kOutlierBits);
  values[at] = 0;
  vf spoiled = zero();
  const float second = largest(values, group, spoiled), peak = second > high ? second : high;
  const float whole = __builtin_rintf(outlier * (127 / peak)), step = 1 << kOutlierBits;
  const float upper = __builtin_rintf(whole / step);
  values[at] = (whole - step * upper) * (peak / 127);  // rounded to what it is
  scales[g] = peak / 127;
  sums[g] = scales[g] * (round_bytes<X::kWords>(values, group, 127 / peak, out + g * group / X::kEach) + step * upper);
  const auto put = [&](int64_t part, int64_t word) {
    const auto narrow = static_cast<uint32_t>(word);
    __builtin_memcpy(entry + part * count, &narrow, sizeof narrow);
  };
  const int64_t value = g * group + at, in_dword = value % F::kSteps;
  const auto byte = static_cast<uint8_t>(upper == upper ? static_cast<int>(upper) : 0);  // NaN is in the sums
  entry[0] = scales[g] * step;
  put(1, static_cast<int64_t>(byte) << (8 * (in_dword / X::kWords)));
  put(2, value / F::kSteps * kBand);
  put(3, in_dword % X::kWords * F::kBits);
  put(4, value / w.group * kBand);
}

template <class F>
inline void round_row_coarsely(const Matrix& w, const float* x, float* out) {
  using X = Quads<F>;
  const int64_t group = X::group(w), groups = X::groups(w);
  float *scales = out + X::scales_at(w), *sums = out + X::sums_at(w);
  vf spoiled = zero();
  for (int64_t first = 0; first < groups; first += kOutlierRun) {
    const int64_t here = groups - first < kOutlierRun ? groups - first : kOutlierRun;
    float tops[kOutlierRun];
    for (int64_t i = 0; i < here; ++i) {
      const int64_t g = first + i;
      tops[i] = largest(x + g * group, group, spoiled);
      scales[g] = tops[i] / 127;
      sums[g] = scales[g] * round_bytes<X::kWords>(x + g * group, group, 127 / tops[i], out + g * group / X::kEach);
    }
    for (int64_t n = 0; n < (here + 3) / 4; ++n) {
      int64_t best = 0;
      for (int64_t i = 1; i < here; ++i) best = tops[i] > tops[best] ? i : best;
      round_outlier<X>(w, x, first + best, tops[best], first / 4 + n, out);
      tops[best] = 0;
    }
  }
  sums[0] += sum(spoiled);
}

}  // namespace headrace::HEADRACE_ISA
