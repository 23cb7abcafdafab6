// One or two rounded activation rows times a matrix of 2-, 4- or 8-bit weights: the kernel of a decode step.
//
// A vector of weights holds neighbours of one row; sums across lanes are left to the end of a row. Weights are read once,
// in one sweep through memory, and a step is bound by how fast they arrive.
#pragma once

#include "rounded.h"

namespace headrace::HEADRACE_ISA {

// How R weight rows at a time go through memory: `apart` rows from each other, weights and scales asked for so many bytes
// ahead of the arithmetic. Long stretches are read as R streams side by side, which memory serves best. Short ones end
// before R streams are under way: neighbouring rows are taken, in one sweep that goes on into the next stretch.
struct Sweep {
  int64_t apart = 1, weights_ahead = 1536, scales_ahead = 1024;

  Sweep(const Matrix& w, int64_t rows, int64_t at_once) {
    constexpr int64_t kLongStream = 32768, kSweepAhead = 6144;
    if (rows / at_once * w.row_bytes() >= kLongStream) {
      apart = rows / at_once;
    } else {
      const int64_t rows_ahead = ceil_div(kSweepAhead, at_once * w.row_bytes()) * at_once;
      weights_ahead = rows_ahead * w.row_bytes();
      scales_ahead = rows_ahead * w.groups() * size_of(w.type);
    }
  }
};

// acc[m][r] += w[row + r * sweep.apart] . x[m], per lane. Rows of x are ldx apart.
template <class F, int R, int M>
[[gnu::always_inline]] inline void accumulate_pairs(const Matrix& w, const Groups<F>& groups, const float* x,
                                                    int64_t ldx, int64_t row, const Sweep& sweep, vf (&acc)[M][R]) {
  constexpr int kHalf = Rounded<F>::kHalf;
  const int64_t stride = w.row_bytes() * sweep.apart, ahead = sweep.weights_ahead;
  const uint8_t* data = row_data(w, row);
  const float* sums = x + Rounded<F>::sums_at(w);

  for (int64_t g = 0; g < groups.count; g += W) {
    const int64_t n = groups.batch(g);
    vf scales[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const int64_t at = (row + r * sweep.apart) * groups.count + g;
      const int64_t later = at * size_of(w.type) + sweep.scales_ahead;
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
        __builtin_prefetch(data + r * stride + ahead + b * F::kBlock * F::kBits / 8, 0, 0);
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

// y[m * ldy + r * apart] = the sum of acc[m][r]. Taken four at a time, which is how sums are cheap.
template <int R, int M>
[[gnu::always_inline]] inline void store_sums(const vf (&acc)[M][R], int64_t apart, float* y, int64_t ldy) {
  constexpr int kSums = R * M;
  const auto pick = [&](int i) __attribute__((always_inline)) { return i < kSums ? acc[i / R][i % R] : zero(); };
#pragma GCC unroll 8
  for (int i = 0; i < kSums; i += 4) {
    alignas(16) float out[4];
    store_sums4(out, pick(i), pick(i + 1), pick(i + 2), pick(i + 3));
    for (int j = i; j < i + 4 && j < kSums; ++j) y[j / R * ldy + j % R * apart] = out[j - i];
  }
}

// y[m * ldy + r] for weight rows [row, row + rows) and one or two rows of activations: as many weight rows at a time as
// registers allow.
template <class F, int M>
inline void multiply_rows(const Matrix& w, const float* x, int64_t ldx, int64_t row, int64_t rows, float* y,
                           int64_t ldy) {
  constexpr int R = kPairRows / M < 4 ? kPairRows / M : 4;
  const Groups<F> groups(w);
  const Sweep sweep(w, rows, R);
  const int64_t rounds = rows / R, step = sweep.apart == 1 ? R : 1;
  for (int64_t i = 0; i < rounds; ++i) {
    vf acc[M][R] = {};
    accumulate_pairs<F, R, M>(w, groups, x, ldx, row + i * step, sweep, acc);
    store_sums<R, M>(acc, sweep.apart, y + i * step, ldy);
  }
  for (int64_t r = rounds * R; r < rows; ++r) {
    vf acc[M][1] = {};
    accumulate_pairs<F, 1, M>(w, groups, x, ldx, row + r, sweep, acc);
    store_sums<1, M>(acc, 1, y + r, ldy);
  }
}

}  // namespace headrace::HEADRACE_ISA
