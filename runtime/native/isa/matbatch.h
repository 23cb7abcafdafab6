// Up to eight activation rows times a matrix: every weight is unpacked and scaled once and meets all rows. In floats here,
// in integers, for any number of rows, in bands.h.
//
// Tiles of R weight rows by M activation rows keep their sums in registers; k is walked in slabs whose activations
// stay in the first-level cache.
#pragma once

#include "weights.h"

namespace headrace::HEADRACE_ISA {

constexpr int64_t kSlab = 768;  // values of k: eight activation rows of it are half a first-level cache

// Dequantized vectors `step` of block b for R rows, as the format gives them.
template <class F, int R>
struct TileReader {
  const Matrix& w;
  const Groups<F>& groups;
  const uint8_t* data[R];
  int64_t row;

  TileReader(const Matrix& matrix, const Groups<F>& its_groups, int64_t first_row)
      : w(matrix), groups(its_groups), row(first_row) {
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
      for (int64_t g = begin >> groups.shift; g << groups.shift < end; g += W) {
        const int64_t n = groups.batch(g);
        vf scales[R], offsets[R];
        for (int r = 0; r < R; ++r) {
          const int64_t at = (row + r) * groups.count + g;
          scales[r] = load_first_any(w.scales, w.type, at, n);
          offsets[r] = F::kAffine ? load_first_any(w.offsets, w.type, at, n) : zero();
          F::adapt(scales[r], offsets[r]);
        }
        const int64_t batch_end = (g + n) << groups.shift;
        const int64_t stop = batch_end < end ? batch_end : end;
        for (int64_t b = (g << groups.shift) / F::kBlock; b * F::kBlock < stop; ++b) {
          const int64_t left = stop - b * F::kBlock;
          const int64_t scale_at = groups.scale_at(b, g);
          typename F::Raw raw[R];
          vf s[R], o[R], v[R];
          for (int r = 0; r < R; ++r) {
            raw[r] = left >= F::kBlock ? F::load(data[r], b) : F::load_last(data[r], b, left);
            s[r] = groups.spread.pick(scales[r], scale_at);
            o[r] = groups.spread.pick(offsets[r], scale_at);
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

// y[m][r] (+)= the sum of acc[m][r].
template <int R, int M>
[[gnu::always_inline]] inline void add_sums(const vf (&acc)[M][R], bool add_to, float* y, int64_t ldy) {
  for (int m = 0; m < M; ++m) {
    alignas(16) float out[4];
    vf a[4];
    for (int r = 0; r < 4; ++r) a[r] = acc[m][r < R ? r : 0];
    store_sums4(out, a[0], a[1], a[2], a[3]);
    for (int r = 0; r < R; ++r) y[m * ldy + r] = out[r] + (add_to ? y[m * ldy + r] : 0.0f);
  }
}

// acc[m][r] += x[m] . v[r] for one vector of k.
template <int R, int M>
[[gnu::always_inline]] inline void meet(const float* x, int64_t stride, const vf (&v)[R], vf (&acc)[M][R]) {
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    const vf xs = load(x + m * stride);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) acc[m][r] = fma(v[r], xs, acc[m][r]);
  }
}

// As many weight rows as registers allow beside M activation rows.
constexpr int tile_rows(int m) {
  constexpr int kRegisters = kPanelVectors == 4 ? 24 : 10;
  const int fit = kRegisters / m;
  return fit >= 4 ? 4 : (fit < 1 ? 1 : fit);
}

// R rows over one slab of k. A few activation rows meet weights as they are unpacked; for more, registers would not
// do: the weights go through the first-level cache first.
template <class F, int R, int M>
inline void batch_slab(const Matrix& w, const Groups<F>& groups, const float* x, int64_t stride, int64_t row,
                       int64_t begin, int64_t end, float* y, int64_t ldy) {
  vf acc[M][R];
  for (int m = 0; m < M; ++m) {
    for (int r = 0; r < R; ++r) acc[m][r] = zero();
  }
  if constexpr (M <= 4) {
    TileReader<F, R>(w, groups, row).walk(begin, end, [&](int64_t b, int step, const vf(&v)[R]) {
      meet<R, M>(x + (b * F::kSteps + step) * W, stride, v, acc);
    });
  } else {
    alignas(64) float tile[R * kSlab];
    const int64_t first = begin / F::kBlock * F::kSteps;
    for (int r = 0; r < R; ++r) {
      TileReader<F, 1>(w, groups, row + r).walk(begin, end, [&](int64_t b, int step, const vf(&v)[1]) {
        store(tile + r * kSlab + (b * F::kSteps + step - first) * W, v[0]);
      });
    }
    const int64_t vectors = ceil_div(end - begin, F::kBlock) * F::kSteps;
    for (int64_t i = 0; i < vectors; ++i) {
      vf v[R];
      for (int r = 0; r < R; ++r) v[r] = load(tile + r * kSlab + i * W);
      meet<R, M>(x + (first + i) * W, stride, v, acc);
    }
  }
  add_sums<R, M>(acc, begin != 0, y, ldy);
}

template <class F, int M>
inline void batch_rows(const Matrix& w, const float* x, int64_t stride, int64_t row, int64_t rows, float* y,
                       int64_t ldy) {
  constexpr int R = tile_rows(M);
  const Groups<F> groups(w);
  for (int64_t k = 0; k < w.k; k += kSlab) {
    const int64_t end = w.k - k < kSlab ? w.k : k + kSlab;
    int64_t r = 0;
    for (; r + R <= rows; r += R) batch_slab<F, R, M>(w, groups, x, stride, row + r, k, end, y + r, ldy);
    for (; r < rows; ++r) batch_slab<F, 1, M>(w, groups, x, stride, row + r, k, end, y + r, ldy);
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
