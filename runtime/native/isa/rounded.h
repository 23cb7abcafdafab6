// Activations in block floating point, to be multiplied with 2-, 4- and 8-bit weights as 16-bit integers.
//
// The values of one group of weights share a scale, their largest magnitude / 32767; weights stay the stored integers. One instruction
// multiplies and adds two values per lane. The result is the exact product with the rounded activations, each within max|x| / 65534
// (the maximum over the group). Infinities and NaN come out as NaN.
#pragma once

#include <utility>

#include "weights.h"

namespace headrace::HEADRACE_ISA {

// The layout of a row of rounded activations: for every dword of weights kHalf pairs (values s and s + kHalf of the dword's),
// each in the room of a float; then the scale of every group; then the sum of every group's rounded values.
template <class F>
struct Rounded {
  static constexpr int kHalf = F::kSteps / 2;

  static int64_t scales_at(const Matrix& w) { return w.k / 2; }
  static int64_t sums_at(const Matrix& w) { return w.k / 2 + w.groups(); }
  static int64_t size(const Matrix& w) { return round_up(w.k / 2 + 2 * w.groups(), 16); }
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
  float* scales = out + Rounded<F>::scales_at(w);
  float* sums = out + Rounded<F>::sums_at(w);
  vf spoiled = zero();
  for (int64_t g = 0; g < w.groups(); ++g) {
    const float* from = x + g * w.group;
    const float top = largest(from, w.group, spoiled);
    scales[g] = top / 32767;
    sums[g] = scales[g] * round_values<Rounded<F>::kHalf>(from, w.group, 32767 / top, out + g * w.group / 2);
  }
  sums[0] += sum(spoiled);  // which is in every product
}

}  // namespace headrace::HEADRACE_ISA
