// Activations in the kernels' layout: rounded if the matrix rounds(), else in the weight format's order (weights.h, `source`).
//
//   matrix                                    layout of a prepared row                              floats
//   rounds(), rounding 16                     pairs, scales, sums (rounded.h, Pairs)                Pairs<F>::size
//   rounds(), rounding 8                      quads, scales, sums, outliers (rounded.h, Quads)      Quads<F>::size
//   rounds(), rounding kHalves, fits_tiles()  two bfloat16 numbers for each value (halves.h)        K
//   any other                                 K floats in the format's order, then zeros            padded_depth: whole blocks, 16 at least
//
// kHalves needs kernels with multiply_tiles ("amx", "amx-emulated"), which are built with AVX-512 alone. bind/layer_primitive.cpp chooses
// it for rows of prompts (`rounding_of_prompts`). bind/linear_primitive.cpp takes it from its caller, and refuses it without such kernels.
// core/linear.cpp keeps 16 bits for a matrix that does not fit tiles. So `prepare` of another set never meets it.
//
// Guard: runtime/native/tests/projections.cpp, for every rounding; tests/runtime/ops/test_coarse_activations.py and test_tiles.py.
#pragma once

#include "rounded.h"
#if defined(HEADRACE_AVX512)
#include "halves.h"
#endif

namespace headrace::HEADRACE_ISA {

// Floats of a prepared row for w: a multiple of 16.
inline int64_t prepared_size(const Matrix& w) {
  if (w.rounds()) {
    if (w.rounding == kHalves) return w.k;  // K / 2 pairs of high parts, then of low ones; fits_tiles() has K a multiple of 32
    return with_words(w, [&](auto format) {
      using F = decltype(format);
      return w.rounding == 8 ? Quads<F>::size(w) : Pairs<F>::size(w);
    });
  }
  return with_format(w, [&](auto format) {
    return padded_depth<decltype(format)>(w);
  });
}

// x, out (F::kBlock): a block of values in the format's order.
template <class F>
inline void order_block(const float* x, float* out) {
  for (int step = 0; step < F::kSteps; ++step) {
    for (int lane = 0; lane < W; ++lane) out[step * W + lane] = x[F::source(step, lane)];
  }
}

// out (prepared_size(w)) from x (K).
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
    for (; k < depth; k += F::kBlock) {  // the last block, with zeros for values that w lacks
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
