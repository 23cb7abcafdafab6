// Activations in the order a weight format's kernels read them, followed by their sum per group.
//
// The sums make the affine offset cheap: sum((s q + o) x) = s sum(q x) + o sum(x).
#pragma once

#include "weights.h"

namespace headrace::HEADRACE_ISA {

inline int64_t prepared_size(const Matrix& w) {
  return with_format(w, [&](auto format) {
    using F = decltype(format);
    return padded_depth<F>(w) + (F::kPaired ? 2 : 1) * round_up(w.groups(), 16);
  });
}

template <class F>
inline void order_block(const float* x, float* out) {
  for (int step = 0; step < F::kSteps; ++step) {
    for (int lane = 0; lane < W; ++lane) out[step * W + lane] = x[F::source(step, lane)];
  }
}

// Sums over each group of `w`; with Odd, of the values at odd places only (what paired nibbles need besides).
template <bool Odd>
inline void group_sums(const Matrix& w, const float* x, float* sums_out) {
  const int64_t groups = w.groups();
  const int64_t shift = __builtin_ctzll(static_cast<uint64_t>(w.group));
  for (int64_t g = 0; g < round_up(groups, 16); ++g) {
    float lanes[8] = {};
    for (int64_t i = g << shift; g < groups && i < (g + 1) << shift; i += 8) {
      for (int j = 0; j < 8; ++j) lanes[j] += x[i + j];
    }
    const float odd = (lanes[1] + lanes[3]) + (lanes[5] + lanes[7]);
    sums_out[g] = Odd ? odd : odd + ((lanes[0] + lanes[2]) + (lanes[4] + lanes[6]));
  }
}

inline void prepare(const Matrix& w, const float* x, float* out) {
  with_format(w, [&](auto format) {
    using F = decltype(format);
    const int64_t depth = padded_depth<F>(w);
    const int64_t whole = w.k / F::kBlock * F::kBlock;
    int64_t k = 0;
    for (; k < whole; k += F::kBlock) order_block<F>(x + k, out + k);
    for (; k < depth; k += F::kBlock) {
      for (int step = 0; step < F::kSteps; ++step) {
        for (int lane = 0; lane < W; ++lane) {
          const int64_t from = k + F::source(step, lane);
          out[k + step * W + lane] = from < w.k ? x[from] : 0.0f;
        }
      }
    }
    if (w.quantized()) group_sums<false>(w, x, out + depth);
    if (F::kPaired) group_sums<true>(w, x, out + depth + round_up(w.groups(), 16));
  });
}

}  // namespace headrace::HEADRACE_ISA
