// One or two rounded activation rows times a matrix of 2-, 4- or 8-bit weights: the kernel of a decode step.
//
// A vector of weights holds neighbours of one row; sums across lanes are left to the end of a row. Weights are read once,
// in one sweep through memory, and a step is bound by how fast they arrive.
#pragma once

#include "rounded.h"

namespace headrace::HEADRACE_ISA {

// How many rows ahead of the arithmetic weights are asked for, where `at_once` are taken at a time. Sweeps go through memory
// in one direction, but in steps that the processor's own prefetcher does not see as one.
inline int64_t rows_ahead(const Matrix& w, int64_t at_once) {
  constexpr int64_t kBytesAhead = 6144;
  return ceil_div(kBytesAhead, at_once * w.row_bytes()) * at_once;
}

// acc[m][r] += w[row + r] . x[m], per lane. Rows of x are ldx apart.
template <class F, int R, int M>
[[gnu::always_inline]] inline void accumulate_pairs(const Matrix& w, const Groups<F>& groups, const float* x,
                                                    int64_t ldx, int64_t row, vf (&acc)[M][R]) {
  constexpr int kHalf = Rounded<F>::kHalf;
  const int64_t stride = w.row_bytes(), ahead = rows_ahead(w, R);
  const uint8_t* data = row_data(w, row);
  const float* sums = x + Rounded<F>::sums_at(w);

  for (int64_t g = 0; g < groups.count; g += W) {
    const int64_t n = groups.batch(g);
    vf scales[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const int64_t at = (row + r) * groups.count + g, later = (at + ahead * groups.count) * size_of(w.type);
      __builtin_prefetch(static_cast<const uint8_t*>(w.scales) + later);
      __builtin_prefetch(static_cast<const uint8_t*>(w.offsets) + later);
      const vf offset = n == W ? load_any(w.offsets, w.type, at) : load_first_any(w.offsets, w.type, at, n);
      scales[r] = n == W ? load_any(w.scales, w.type, at) : load_first_any(w.scales, w.type, at, n);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) acc[m][r] = fma(offset, load(sums + m * ldx + g), acc[m][r]);
    }
    auto block = [&](int64_t b, auto load_raw) __attribute__((always_inline)) {
      const int64_t scale_at = groups.scale_at(b, g);
      vi weights[R][kHalf];
      vf weight_scale[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const vi raw = load_raw(data + r * stride);
        __builtin_prefetch(data + (r + ahead) * stride + b * F::kBlock * F::kBits / 8, 0, 0);
        weight_scale[r] = groups.spread.pick(scales[r], scale_at);
#pragma GCC unroll 8
        for (int s = 0; s < kHalf; ++s) weights[r][s] = pairs<F::kBits>(raw, s);
      }
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const float* here = x + m * ldx + b * Rounded<F>::kBlockFloats;
        vi dot[R];
#pragma GCC unroll 8
        for (int s = 0; s < kHalf; ++s) {
          const vi xs = load_words(here + s * W);
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) dot[r] = dot_pairs(s == 0 ? vi{} : dot[r], weights[r][s], xs);
        }
        const vf scale = load(here + kHalf * W);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) acc[m][r] = fma(mul(weight_scale[r], scale), to_float(dot[r]), acc[m][r]);
      }
    };
    const int64_t stop = (g + n) << groups.shift;
    int64_t b = (g << groups.shift) / F::kBlock;
    for (; (b + 1) * F::kBlock <= stop; ++b) {
      block(b, [&](const uint8_t* p) { return F::load(p, b); });
    }
    if (b * F::kBlock < stop) {
      block(b, [&](const uint8_t* p) { return F::load_last(p, b, stop - b * F::kBlock); });
    }
  }
}

// y[m * ldy + r] = the sum of acc[m][r]. Taken four at a time, which is how sums are cheap.
template <int R, int M>
[[gnu::always_inline]] inline void store_sums(const vf (&acc)[M][R], float* y, int64_t ldy) {
  constexpr int kSums = R * M;
  const auto pick = [&](int i) __attribute__((always_inline)) { return i < kSums ? acc[i / R][i % R] : zero(); };
#pragma GCC unroll 8
  for (int i = 0; i < kSums; i += 4) {
    alignas(16) float out[4];
    store_sums4(out, pick(i), pick(i + 1), pick(i + 2), pick(i + 3));
    for (int j = i; j < i + 4 && j < kSums; ++j) y[j / R * ldy + j % R] = out[j - i];
  }
}

// y[m * ldy + r] for weight rows [row, row + rows) and one or two rows of activations: as many weight rows at a time as
// registers allow.
template <class F, int M>
inline void multiply_rows(const Matrix& w, const float* x, int64_t ldx, int64_t row, int64_t rows, float* y,
                           int64_t ldy) {
  constexpr int R = kPairRows / M < 4 ? kPairRows / M : 4;
  const Groups<F> groups(w);
  int64_t r = 0;
  for (; r + R <= rows; r += R) {
    vf acc[M][R] = {};
    accumulate_pairs<F, R, M>(w, groups, x, ldx, row + r, acc);
    store_sums<R, M>(acc, y + r, ldy);
  }
  for (; r < rows; ++r) {
    vf acc[M][1] = {};
    accumulate_pairs<F, 1, M>(w, groups, x, ldx, row + r, acc);
    store_sums<1, M>(acc, y + r, ldy);
  }
}

}  // namespace headrace::HEADRACE_ISA
