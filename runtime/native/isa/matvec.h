// One activation row times a matrix: the kernel of a decode step, bound by how fast weights arrive.
//
// Quantized values are multiplied unscaled; each block's partial sums meet their scale once, and the affine
// offsets meet the groups' sums of x. Four rows at a time share every load of x.
#pragma once

#include "weights.h"

namespace headrace::HEADRACE_ISA {

template <class F, int R>
inline void accumulate_quantized(const Matrix& w, const float* x, int64_t row, vf (&acc)[R]) {
  const GroupWalk walk(w);
  const Spread spread = F::spread(w.group);
  const float* group_sums = x + padded_depth<F>(w);
  const uint8_t* data[R];
  for (int r = 0; r < R; ++r) data[r] = row_data(w, row + r);

  for (int64_t g = 0; g < walk.groups; g += W) {
    const int64_t n = walk.in_batch(g);
    const vf sums_here = load(group_sums + g);
    vf scales[R];
    for (int r = 0; r < R; ++r) {
      const int64_t at = (row + r) * walk.groups + g;
      if (n == W) {
        scales[r] = load_any(w.scales, w.type, at);
        acc[r] = fma(load_any(w.offsets, w.type, at), sums_here, acc[r]);
      } else {
        scales[r] = load_first_any(w.scales, w.type, at, n);
        acc[r] = fma(load_first_any(w.offsets, w.type, at, n), sums_here, acc[r]);
      }
    }
    auto block = [&](int64_t b, auto load_raw) {
      typename F::Raw raw[R];
      vf dot[R];
      for (int r = 0; r < R; ++r) raw[r] = load_raw(data[r]);
#pragma GCC unroll 16
      for (int step = 0; step < F::kSteps; ++step) {
        const vf xs = load(x + (b * F::kSteps + step) * W);
        for (int r = 0; r < R; ++r) {
          const vf q = F::value(raw[r], step);
          dot[r] = step == 0 ? mul(q, xs) : fma(q, xs, dot[r]);
        }
      }
      const int64_t scale_at = ((b * F::kBlock) >> walk.group_shift) - g;
      for (int r = 0; r < R; ++r) acc[r] = fma(spread.pick(scales[r], scale_at), dot[r], acc[r]);
    };
    const int64_t begin = g << walk.group_shift;
    const int64_t end = begin + (n << walk.group_shift);
    int64_t b = begin / F::kBlock;
    for (; (b + 1) * F::kBlock <= end; ++b) {
      block(b, [&](const uint8_t* p) { return F::load(p, b); });
    }
    if (b * F::kBlock < end) {
      block(b, [&](const uint8_t* p) { return F::load_last(p, b, end - b * F::kBlock); });
    }
  }
}

template <class F, int R>
inline void accumulate_plain(const Matrix& w, const float* x, int64_t row, vf (&acc)[R]) {
  const uint8_t* data[R];
  for (int r = 0; r < R; ++r) data[r] = row_data(w, row + r);
  const int64_t whole = w.k / W;
  for (int64_t b = 0; b < whole; ++b) {
    const vf xs = load(x + b * W);
    for (int r = 0; r < R; ++r) acc[r] = fma(F::load(data[r], b), xs, acc[r]);
  }
  if (const int64_t rest = w.k - whole * W; rest != 0) {
    const vf xs = load(x + whole * W);
    for (int r = 0; r < R; ++r) acc[r] = fma(F::load_last(data[r], whole, rest), xs, acc[r]);
  }
}

template <class F, int R>
inline void matvec_rows(const Matrix& w, const float* x, int64_t row, float* y) {
  vf acc[R];
  for (int r = 0; r < R; ++r) acc[r] = zero();
  if constexpr (F::kBits == 0) {
    accumulate_plain<F, R>(w, x, row, acc);
  } else {
    accumulate_quantized<F, R>(w, x, row, acc);
  }
  if constexpr (R == 4) {
    store_sums4(y, acc[0], acc[1], acc[2], acc[3]);
  } else {
    for (int r = 0; r < R; ++r) y[r] = sum(acc[r]);
  }
}

inline void matvec(const Matrix& w, const float* x, int64_t row, int64_t rows, float* y) {
  with_format(w, [&](auto format) {
    using F = decltype(format);
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) matvec_rows<F, 4>(w, x, row + r, y + r);
    for (; r < rows; ++r) matvec_rows<F, 1>(w, x, row + r, y + r);
  });
}

}  // namespace headrace::HEADRACE_ISA
