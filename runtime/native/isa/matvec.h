// One activation row times a matrix: the kernel of a decode step, bound by how fast weights arrive. In floats here, in
// integers in bands.h.
//
// Quantized values are multiplied unscaled; each block's partial sums meet their scale once, and the affine
// offsets meet the groups' sums of x. Four rows at a time share every load of x.
#pragma once

#include "weights.h"

namespace headrace::HEADRACE_ISA {

// How far ahead of the arithmetic each stream of weights and of scales is asked for, in bytes. Rows are short (288 bytes
// at K = 576, 4 bits) and a round follows a dozen streams, more than the processor's own prefetcher keeps up with. A
// step never comes back to a weight, so weights are asked for past the outer caches.
constexpr int64_t kWeightsAhead = 1536;
constexpr int64_t kScalesAhead = 256;

// acc[r] += w[row + r * apart] . x, per lane.
template <class F, Type T, int R>
[[gnu::always_inline]] inline void accumulate_quantized(const Matrix& w, const Groups<F>& groups, const float* x,
                                                        const float* group_sums, int64_t row, int64_t apart,
                                                        vf (&acc)[R]) {
  const int64_t stride = w.row_bytes() * apart;
  const uint8_t* data = row_data(w, row);

  for (int64_t g = 0; g < groups.count; g += W) {
    const int64_t n = groups.batch(g);
    const vf sums_here = load(group_sums + g);
    vf scales[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const int64_t at = (row + r * apart) * groups.count + g;
      __builtin_prefetch(static_cast<const uint8_t*>(w.scales) + at * size_of(T) + kScalesAhead);
      scales[r] = n == W ? load_as<T>(w.scales, at) : load_first_as<T>(w.scales, at, n);
      if constexpr (F::kAffine) {
        __builtin_prefetch(static_cast<const uint8_t*>(w.offsets) + at * size_of(T) + kScalesAhead);
        vf offset = n == W ? load_as<T>(w.offsets, at) : load_first_as<T>(w.offsets, at, n);
        F::adapt(scales[r], offset);
        acc[r] = fma(offset, sums_here, acc[r]);
      }
    }
    auto block = [&](int64_t b, auto load_raw) __attribute__((always_inline)) {
      typename F::Raw raw[R];
      vf dot[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        raw[r] = load_raw(data + r * stride);
        __builtin_prefetch(data + r * stride + b * F::kBlock * F::kBits / 8 + kWeightsAhead, 0, 0);
      }
#pragma GCC unroll 16
      for (int step = 0; step < F::kSteps; ++step) {
        const vf xs = load(x + (b * F::kSteps + step) * W);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const vf q = F::value(raw[r], step);
          dot[r] = step == 0 ? mul(q, xs) : fma(q, xs, dot[r]);
        }
      }
      const int64_t scale_at = groups.scale_at(b, g);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) acc[r] = fma(groups.spread.pick(scales[r], scale_at), dot[r], acc[r]);
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
[[gnu::always_inline]] inline void accumulate_plain(const Matrix& w, const float* x, int64_t row, int64_t apart,
                                                    vf (&acc)[R]) {
  const int64_t stride = w.row_bytes() * apart;
  const uint8_t* data = row_data(w, row);
  const int64_t whole = w.k / W;
  for (int64_t b = 0; b < whole; ++b) {
    const vf xs = load(x + b * W);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) acc[r] = fma(F::load(data + r * stride, b), xs, acc[r]);
  }
  if (const int64_t rest = w.k - whole * W; rest != 0) {
    const vf xs = load(x + whole * W);
    for (int r = 0; r < R; ++r) acc[r] = fma(F::load_last(data + r * stride, whole, rest), xs, acc[r]);
  }
}

// y[0, rows) from accumulate(row, apart, acc), which adds the products of rows row + r * apart. The four rows of a round
// lie a quarter of the range apart: each is then a stream of its own that the processor's prefetcher can follow.
// (Four neighbouring rows, taken a block each in turn, arrive at half the speed.)
template <class Accumulate>
[[gnu::always_inline]] inline void matvec_rows(int64_t rows, float* y, Accumulate&& accumulate) {
  const int64_t apart = rows / 4;
  for (int64_t row = 0; row < apart; ++row) {
    vf acc[4] = {zero(), zero(), zero(), zero()};
    accumulate(row, apart, acc);
    float out[4];
    store_sums4(out, acc[0], acc[1], acc[2], acc[3]);
    for (int r = 0; r < 4; ++r) y[row + r * apart] = out[r];
  }
  for (int64_t row = 4 * apart; row < rows; ++row) {
    vf acc[1] = {zero()};
    accumulate(row, int64_t{0}, acc);
    y[row] = sum(acc[0]);
  }
}

template <class F, Type T>
inline void matvec_quantized(const Matrix& w, const float* x, int64_t first, int64_t rows, float* y) {
  const Groups<F> groups(w);
  const float* sums = x + padded_depth<F>(w);
  matvec_rows(rows, y, [&](int64_t row, int64_t apart, auto& acc) __attribute__((always_inline)) {
    accumulate_quantized<F, T>(w, groups, x, sums, first + row, apart, acc);
  });
}

template <class F>
inline void matvec_plain(const Matrix& w, const float* x, int64_t first, int64_t rows, float* y) {
  matvec_rows(rows, y, [&](int64_t row, int64_t apart, auto& acc) __attribute__((always_inline)) {
    accumulate_plain<F>(w, x, first + row, apart, acc);
  });
}

inline void matvec(const Matrix& w, const float* x, int64_t row, int64_t rows, float* y) {
  with_format(w, [&](auto format) {
    using F = decltype(format);
    if constexpr (F::kBits == 0) {
      matvec_plain<F>(w, x, row, rows, y);
    } else {
      with_scales<F>(w, [&](auto type) { matvec_quantized<F, decltype(type)::value>(w, x, row, rows, y); });
    }
  });
}

}  // namespace headrace::HEADRACE_ISA
