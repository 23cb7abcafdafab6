// One activation row times a matrix: the kernel of a decode step, bound by how fast weights arrive.
//
// Quantized values are multiplied unscaled; each block's partial sums meet their scale once, and the affine
// offsets meet the groups' sums of x. Four rows at a time share every load of x.
#pragma once

#include "weights.h"

namespace headrace::HEADRACE_ISA {

constexpr int64_t kPrefetchBytes = 3072;  // at least this far ahead, in whole groups of rows

template <class F, Type T, int R>
[[gnu::always_inline]] inline void accumulate_quantized(const Matrix& w, const Groups<F>& groups, const float* x,
                                                        const float* group_sums, int64_t row, vf (&acc)[R]) {
  const int64_t row_bytes = w.row_bytes();
  const uint8_t* data = row_data(w, row);
  const uint8_t* ahead = data + (kPrefetchBytes / (R * row_bytes) + 1) * (R * row_bytes);

  for (int64_t g = 0; g < groups.count; g += W) {
    const int64_t n = groups.batch(g);
    const vf sums_here = load(group_sums + g);
    vf scales[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const int64_t at = (row + r) * groups.count + g;
      vf offset = n == W ? load_as<T>(w.offsets, at) : load_first_as<T>(w.offsets, at, n);
      scales[r] = n == W ? load_as<T>(w.scales, at) : load_first_as<T>(w.scales, at, n);
      if constexpr (F::kPaired) {
        scales[r] = mul(scales[r], set1(16.0f));
        acc[r] = fma(sub(zero(), scales[r]), load(group_sums + round_up(groups.count, 16) + g), acc[r]);
      } else {
        F::adapt(scales[r], offset);
      }
      acc[r] = fma(offset, sums_here, acc[r]);
    }
    auto block = [&](int64_t b, auto load_raw) __attribute__((always_inline)) {
      typename F::Raw raw[R];
      vf dot[R][2];  // of even and of odd steps
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        raw[r] = load_raw(data + r * row_bytes);
        prefetch(ahead + r * row_bytes + b * (F::kBlock * F::kBits / 8));
      }
#pragma GCC unroll 16
      for (int step = 0; step < F::kSteps; step += 2) {
        const vf even = load(x + (b * F::kSteps + step) * W);
        const vf odd = load(x + (b * F::kSteps + step + 1) * W);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          vf low, high;
          if constexpr (F::kPaired) {
            nibbles(raw[r], step / 2, low, high);
          } else {
            low = F::value(raw[r], step);
            high = F::value(raw[r], step + 1);
          }
          dot[r][0] = step == 0 ? mul(low, even) : fma(low, even, dot[r][0]);
          dot[r][1] = step == 0 ? mul(high, odd) : fma(high, odd, dot[r][1]);
        }
      }
      const int64_t scale_at = groups.scale_at(b, g);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const vf both = F::kPaired ? fma(dot[r][0], set1(16.0f), dot[r][1]) : add(dot[r][0], dot[r][1]);
        acc[r] = fma(groups.spread.pick(scales[r], scale_at), both, acc[r]);
      }
    };
    const int64_t end = (g + n) << groups.shift;
    int64_t b = (g << groups.shift) / F::kBlock;
    for (; (b + 1) * F::kBlock <= end; ++b) {
      block(b, [&](const uint8_t* p) { return F::load(p, b); });
    }
    if (b * F::kBlock < end) {
      block(b, [&](const uint8_t* p) { return F::load_last(p, b, end - b * F::kBlock); });
    }
  }
}

template <class F, int R>
[[gnu::always_inline]] inline void accumulate_plain(const Matrix& w, const float* x, int64_t row, vf (&acc)[R]) {
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

// y[0, R) from a function that adds R rows' products to accumulators.
template <int R, class Accumulate>
[[gnu::always_inline]] inline void matvec_rows(float* y, Accumulate&& accumulate) {
  vf acc[R];
  for (int r = 0; r < R; ++r) acc[r] = zero();
  accumulate(acc);
  if constexpr (R == 4) {
    store_sums4(y, acc[0], acc[1], acc[2], acc[3]);
  } else {
    for (int r = 0; r < R; ++r) y[r] = sum(acc[r]);
  }
}

template <class F, Type T>
inline void matvec_quantized(const Matrix& w, const float* x, int64_t row, int64_t rows, float* y) {
  const Groups<F> groups(w);
  const float* sums = x + padded_depth<F>(w);
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    matvec_rows<4>(y + r, [&](vf(&acc)[4]) { accumulate_quantized<F, T>(w, groups, x, sums, row + r, acc); });
  }
  for (; r < rows; ++r) {
    matvec_rows<1>(y + r, [&](vf(&acc)[1]) { accumulate_quantized<F, T>(w, groups, x, sums, row + r, acc); });
  }
}

template <class F>
inline void matvec_plain(const Matrix& w, const float* x, int64_t row, int64_t rows, float* y) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    matvec_rows<4>(y + r, [&](vf(&acc)[4]) { accumulate_plain<F>(w, x, row + r, acc); });
  }
  for (; r < rows; ++r) {
    matvec_rows<1>(y + r, [&](vf(&acc)[1]) { accumulate_plain<F>(w, x, row + r, acc); });
  }
}

inline void matvec(const Matrix& w, const float* x, int64_t row, int64_t rows, float* y) {
  with_format(w, [&](auto format) {
    using F = decltype(format);
    if constexpr (F::kBits == 0) {
      matvec_plain<F>(w, x, row, rows, y);
    } else {
      switch (w.type) {
        case Type::f16: return matvec_quantized<F, Type::f16>(w, x, row, rows, y);
        case Type::bf16: return matvec_quantized<F, Type::bf16>(w, x, row, rows, y);
        default: return matvec_quantized<F, Type::f32>(w, x, row, rows, y);
      }
    }
  });
}

}  // namespace headrace::HEADRACE_ISA
