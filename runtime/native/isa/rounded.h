// Activations in block floating point, to be multiplied with 2-, 4- and 8-bit weights as 16-bit integers.
//
// The values that meet one group of weights share a scale, their largest magnitude / 32767; weights stay the small integers
// they are stored as. One instruction then multiplies and adds two values a lane, and weights need no conversion. The
// result is the exact product with the rounded activations, each within max|x| / 65534 of its own (the maximum over the
// group). Infinities and NaN come out as NaN.
#pragma once

#include "weights.h"

namespace headrace::HEADRACE_ISA {

// The layout of a row of rounded activations. Per block: kHalf vectors of pairs (values s and s + kHalf of every dword),
// then the scale of every lane. After the blocks: the sum of every group of rounded values, and a vector of zeros.
template <class F>
struct Rounded {
  static constexpr int kHalf = F::kSteps / 2;
  static constexpr int64_t kBlockFloats = (kHalf + 1) * W;  // a pair takes the room of a float

  static int64_t blocks(const Matrix& w) { return ceil_div(w.k, F::kBlock); }
  static int64_t sums_at(const Matrix& w) { return blocks(w) * kBlockFloats; }
  static int64_t size(const Matrix& w) { return sums_at(w) + round_up(w.groups(), 16) + 16; }
};

// The scale that a group of values shares: NaN if one of them is not finite.
inline float shared_scale(const float* x, int64_t group) {
  vf top = set1(1e-30f), spoiled = zero();
  for (int64_t i = 0; i < group; i += W) {
    const vf v = load(x + i);
    top = max(top, max(v, sub(zero(), v)));
    spoiled = add(spoiled, sub(v, v));  // 0, or NaN
  }
  return maximum(top) / 32767 + sum(spoiled);
}

// One block of x; reads W floats past it. Returns the lanes' sums of rounded values.
template <class F>
inline vf round_block(const float* x, vf scale, float* out) {
  constexpr int kHalf = Rounded<F>::kHalf;
  vf values[ceil_div(F::kSteps, W) * W];  // values[s][lane] is value s of the lane's dword
  for (int first = 0; first < F::kSteps; first += W) {
    vf(&square)[W] = reinterpret_cast<vf(&)[W]>(values[first]);
    for (int lane = 0; lane < W; ++lane) square[lane] = load(x + lane * F::kSteps + first);
    transpose(square);
  }
  const vf inverse = div(set1(1.0f), scale);
  vf total = zero();
  for (int s = 0; s < kHalf; ++s) {
    const vf low = round_even(mul(values[s], inverse)), high = round_even(mul(values[s + kHalf], inverse));
    total = add(total, add(low, high));
    store_words(out + s * W, join_pairs(low, high));
  }
  store(out + kHalf * W, scale);
  return mul(total, scale);
}

template <class F>
inline void round_row(const Matrix& w, const float* x, float* out) {
  const int64_t blocks = Rounded<F>::blocks(w);
  const int shift = __builtin_ctzll(static_cast<uint64_t>(w.group));
  float* sums = out + Rounded<F>::sums_at(w);
  for (int64_t i = 0; i < round_up(w.groups(), 16) + 16; ++i) sums[i] = 0;
  int64_t known = -1;  // the group whose scale this is
  float scale = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t first = b * F::kBlock, values = w.k - first < F::kBlock ? w.k - first : F::kBlock;
    const float* from = x + first;
    alignas(64) float padded[F::kBlock + W], lanes[W];
    if (b + 1 == blocks) {
      for (int64_t i = 0; i < F::kBlock + W; ++i) padded[i] = i < values ? from[i] : 0.0f;
      from = padded;
    }
    for (int64_t lane = 0; lane < W; ++lane) {
      const int64_t g = (first + lane * F::kSteps) >> shift;
      if (g != known && g < w.groups()) scale = shared_scale(x + (g << shift), w.group);
      known = g;
      lanes[lane] = scale;
    }
    store(lanes, round_block<F>(from, load(lanes), out + b * Rounded<F>::kBlockFloats));
    for (int64_t lane = 0; lane * F::kSteps < values; ++lane) sums[(first + lane * F::kSteps) >> shift] += lanes[lane];
  }
}

}  // namespace headrace::HEADRACE_ISA
