// Activations as the kernels read them: rounded to 16 bits where the matrix rounds(), else in the weight format's order,
// followed by their sum per group.
//
// The sums make the affine offset cheap: sum((s q + o) x) = s sum(q x) + o sum(x).
#pragma once

#include "rounded.h"

namespace headrace::HEADRACE_ISA {

inline int64_t prepared_size(const Matrix& w) {
  if (w.rounds()) return with_words(w, [&](auto format) { return Rounded<decltype(format)>::size(w); });
  return with_format(w, [&](auto format) {
    using F = decltype(format);
    return padded_depth<F>(w) + round_up(w.groups(), 16);
  });
}

template <class F>
inline void order_block(const float* x, float* out) {
  for (int step = 0; step < F::kSteps; ++step) {
    for (int lane = 0; lane < W; ++lane) out[step * W + lane] = x[F::source(step, lane)];
  }
}

inline void group_sums(const Matrix& w, const float* x, float* sums_out) {
  const int64_t groups = w.groups();
  for (int64_t g = 0; g < groups; ++g) {
    float lanes[8] = {};
    for (int64_t i = g * w.group; i < (g + 1) * w.group; i += 8) {
      for (int j = 0; j < 8; ++j) lanes[j] += x[i + j];
    }
    sums_out[g] = ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) + ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
  }
  for (int64_t g = groups; g < round_up(groups, 16); ++g) sums_out[g] = 0;
}

inline void prepare(const Matrix& w, const float* x, float* out) {
  if (w.rounds()) {
    with_words(w, [&](auto format) { round_row<decltype(format)>(w, x, out); });
    return;
  }
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
    if (w.quantized()) group_sums(w, x, out + depth);
  });
}

}  // namespace headrace::HEADRACE_ISA
