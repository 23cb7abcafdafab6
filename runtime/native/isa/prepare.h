// Activations in the kernels' layout: rounded if the matrix rounds(), else in the weight format's order.
#pragma once

#include "rounded.h"
#if defined(HEADRACE_AVX512)
#include "halves.h"
#endif

namespace headrace::HEADRACE_ISA {

inline int64_t prepared_size(const Matrix& w) {
  if (w.rounds()) {
    if (w.rounding == kHalves) return w.k;  // see halves.h
    return with_words(w, [&](auto format) {
      using F = decltype(format);
      return w.rounding == 8 ? Quads<F>::size(w) : Pairs<F>::size(w);
    });
  }
  return with_format(w, [&](auto format) {
    return padded_depth<decltype(format)>(w);
  });
}

template <class F>
inline void order_block(const float* x, float* out) {
  for (int step = 0; step < F::kSteps; ++step) {
    for (int lane = 0; lane < W; ++lane) out[step * W + lane] = x[F::source(step, lane)];
  }
}

inline void prepare(const Matrix& w, const float* x, float* out) {
  if (w.rounds()) {
    with_words(w, [&](auto format) {
      using F = decltype(format);
#if defined(HEADRACE_AVX512)
      if (w.rounding == kHalves) return halve_row<F>(w, x, out);
#endif
      w.rounding == 8 ? round_row_coarsely<F>(w, x, out) : round_row<F>(w, x, out);
    });
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
  });
}

}  // namespace headrace::HEADRACE_ISA
