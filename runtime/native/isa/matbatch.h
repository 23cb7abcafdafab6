// Up to eight activation rows times a matrix: every weight is unpacked and scaled once and meets all rows.
//
// Tiles of R weight rows by M activation rows keep their sums in registers; k is walked in slabs whose activations
// stay in the first-level cache.
#pragma once

#include "weights.h"

namespace headrace::HEADRACE_ISA {

constexpr int64_t kSlabFloats = 6144;  // 24 KB of activations, half a first-level cache

// Dequantized vectors `step` of block b for R rows, as the format gives them.
template <class F, int R>
struct TileReader {
  const Matrix& w;
  const uint8_t* data[R];
  int64_t row;

  TileReader(const Matrix& matrix, int64_t first_row) : w(matrix), row(first_row) {
    for (int r = 0; r < R; ++r) data[r] = row_data(matrix, first_row + r);
  }

  // use(b, step, vectors) for every vector of the values [begin, end); begin where a block and a group begin.
  template <class Use>
  void walk(int64_t begin, int64_t end, Use&& use) const {
    if constexpr (F::kBits == 0) {
      int64_t b = begin / W;
      vf v[R];
      for (; (b + 1) * W <= end; ++b) {
        for (int r = 0; r < R; ++r) v[r] = F::load(data[r], b);
        use(b, 0, v);
      }
      if (b * W < end) {
        for (int r = 0; r < R; ++r) v[r] = F::load_last(data[r], b, end - b * W);
        use(b, 0, v);
      }
    } else {
      const GroupWalk groups(w);
      const Spread spread = F::spread(w.group);
      for (int64_t g = begin >> groups.group_shift; g << groups.group_shift < end; g += W) {
        const int64_t n = groups.in_batch(g);
        vf scales[R], offsets[R];
        for (int r = 0; r < R; ++r) {
          const int64_t at = (row + r) * groups.groups + g;
          scales[r] = load_first_any(w.scales, w.type, at, n);
          offsets[r] = load_first_any(w.offsets, w.type, at, n);
        }
        const int64_t batch_end = (g + n) << groups.group_shift;
        const int64_t stop = batch_end < end ? batch_end : end;
        for (int64_t b = (g << groups.group_shift) / F::kBlock; b * F::kBlock < stop; ++b) {
          const int64_t left = stop - b * F::kBlock;
          const int64_t scale_at = ((b * F::kBlock) >> groups.group_shift) - g;
          typename F::Raw raw[R];
          vf s[R], o[R], v[R];
          for (int r = 0; r < R; ++r) {
            raw[r] = left >= F::kBlock ? F::load(data[r], b) : F::load_last(data[r], b, left);
            s[r] = spread.pick(scales[r], scale_at);
            o[r] = spread.pick(offsets[r], scale_at);
          }
#pragma GCC unroll 16
          for (int step = 0; step < F::kSteps; ++step) {
            for (int r = 0; r < R; ++r) v[r] = fma(F::value(raw[r], step), s[r], o[r]);
            use(b, step, v);
          }
        }
      }
    }
  }
};

template <class F, int R, int M>
inline void batch_tile(const Matrix& w, const float* x, int64_t stride, int64_t row, int64_t begin, int64_t end,
                       float* y, int64_t ldy) {
  vf acc[M][R];
  for (int m = 0; m < M; ++m) {
    for (int r = 0; r < R; ++r) acc[m][r] = zero();
  }
  TileReader<F, R>(w, row).walk(begin, end, [&](int64_t b, int step, const vf(&v)[R]) {
    const float* at = x + (b * F::kSteps + step) * W;
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const vf xs = load(at + m * stride);
      for (int r = 0; r < R; ++r) acc[m][r] = fma(v[r], xs, acc[m][r]);
    }
  });
  for (int m = 0; m < M; ++m) {
    alignas(16) float out[4];
    vf a[4];
    for (int r = 0; r < 4; ++r) a[r] = r < R ? acc[m][r < R ? r : 0] : zero();
    store_sums4(out, a[0], a[1], a[2], a[3]);
    for (int r = 0; r < R; ++r) y[m * ldy + r] = begin == 0 ? out[r] : y[m * ldy + r] + out[r];
  }
}

// As many weight rows as registers allow beside M activation rows.
constexpr int tile_rows(int m) {
  constexpr int kRegisters = kPanelVectors == 4 ? 24 : 10;
  const int fit = kRegisters / m;
  return fit >= 4 ? 4 : (fit < 1 ? 1 : fit);
}

template <class F, int M>
inline void batch_rows(const Matrix& w, const float* x, int64_t stride, int64_t row, int64_t rows, float* y,
                       int64_t ldy) {
  constexpr int R = tile_rows(M);
  const int64_t unit = w.group > F::kBlock ? w.group : F::kBlock;
  const int64_t fitting = kSlabFloats / M / unit;
  const int64_t slab = (fitting < 1 ? 1 : fitting) * unit;
  for (int64_t k = 0; k < w.k; k += slab) {
    const int64_t end = w.k - k < slab ? w.k : k + slab;
    int64_t r = 0;
    for (; r + R <= rows; r += R) batch_tile<F, R, M>(w, x, stride, row + r, k, end, y + r, ldy);
    for (; r < rows; ++r) batch_tile<F, 1, M>(w, x, stride, row + r, k, end, y + r, ldy);
  }
}

inline void matbatch(const Matrix& w, const float* x, int64_t stride, int64_t batch, int64_t row, int64_t rows,
                     float* y, int64_t ldy) {
  with_format(w, [&](auto format) {
    using F = decltype(format);
    switch (batch) {
      case 1: return batch_rows<F, 1>(w, x, stride, row, rows, y, ldy);
      case 2: return batch_rows<F, 2>(w, x, stride, row, rows, y, ldy);
      case 3: return batch_rows<F, 3>(w, x, stride, row, rows, y, ldy);
      case 4: return batch_rows<F, 4>(w, x, stride, row, rows, y, ldy);
      case 5: return batch_rows<F, 5>(w, x, stride, row, rows, y, ldy);
      case 6: return batch_rows<F, 6>(w, x, stride, row, rows, y, ldy);
      case 7: return batch_rows<F, 7>(w, x, stride, row, rows, y, ldy);
      default: return batch_rows<F, 8>(w, x, stride, row, rows, y, ldy);
    }
  });
}

}  // namespace headrace::HEADRACE_ISA
