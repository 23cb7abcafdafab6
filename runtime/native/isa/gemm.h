// Attention's matrix products in floats: panels of stored keys or values, and a register-blocked tile over them.
//
//   a (m, kc), rows `lda` floats apart    queries, or softmax weights
//   b (kc, kPanel), contiguous            a panel: transposed keys (unpack_panel), or values
//   c (m, kPanel), rows `ldc` apart       scores, or sums of values
//
// core/attend_prefill.cpp is the caller. Guard: runtime/native/tests/attention.cpp (prefill over K/V in float32, and in half precision
// by kernels that do not round attention).
#pragma once

#include "unpack.h"

namespace headrace::HEADRACE_ISA {

constexpr int kPanel = kPanelVectors * W;  // columns of a panel, a multiple of 16: Kernels::panel

// W columns of a panel: out[k * kPanel + r] = w[row + r][k0 + k] for k < kc and r < W, or 0 from r = `rows` on. Converts W rows of w to
// floats in `rows_of_k`, then transposes W x W squares.
template <Type T>
inline void unpack_columns(const Matrix& w, int64_t row, int64_t rows, int64_t k0, int64_t kc, float* out) {
  alignas(64) float rows_of_k[W][kPanelDepth];
  const Groups<Plain<T>> groups(w);
  const int64_t vectors = ceil_div(kc, W);
  for (int64_t r = 0; r < W; ++r) {
    float* to = rows_of_k[r];
    if (r < rows) {
      unpack_row<Plain<T>>(w, groups, row + r, k0, k0 + kc, to);
    } else {
      for (int64_t i = 0; i < vectors; ++i) store(to + i * W, zero());
    }
  }
  for (int64_t i = 0; i < vectors; ++i) {
    vf square[W];
    for (int r = 0; r < W; ++r) square[r] = load(rows_of_k[r] + i * W);
    transpose(square);
    for (int lane = 0; lane < W; ++lane) {
      const int64_t k = i * W + lane;
      if (k < kc) store(out + k * kPanel, square[lane]);
    }
  }
}

// See Kernels::unpack_panel. `out` is the panel (kc, kPanel), of which columns [column, column + rows) are written, and zeros behind them
// to the end of the last vector.
inline void unpack_panel(const Matrix& w, int64_t row, int64_t rows, int64_t k0, int64_t kc, int64_t column,
                         float* out) {
  for (int64_t r = 0; r < rows; r += W) {
    float* to = out + column + r;
    if (w.type == Type::f16) {
      unpack_columns<Type::f16>(w, row + r, rows - r, k0, kc, to);
    } else if (w.type == Type::bf16) {
      unpack_columns<Type::bf16>(w, row + r, rows - r, k0, kc, to);
    } else {
      unpack_columns<Type::f32>(w, row + r, rows - r, k0, kc, to);
    }
  }
}

// M rows of a by the whole panel: M * kPanelVectors sums stay in registers.
template <int M>
inline void gemm_tile(const float* a, int64_t lda, const float* b, float* c, int64_t ldc, int64_t kc,
                      bool accumulate) {
  vf acc[M][kPanelVectors];
  for (int m = 0; m < M; ++m) {
    for (int v = 0; v < kPanelVectors; ++v) acc[m][v] = accumulate ? load(c + m * ldc + v * W) : zero();
  }
  for (int64_t k = 0; k < kc; ++k) {
    vf columns[kPanelVectors];
    for (int v = 0; v < kPanelVectors; ++v) columns[v] = load(b + k * kPanel + v * W);
    for (int m = 0; m < M; ++m) {
      const vf xs = set1(a[m * lda + k]);
      for (int v = 0; v < kPanelVectors; ++v) acc[m][v] = fma(xs, columns[v], acc[m][v]);
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int v = 0; v < kPanelVectors; ++v) store(c + m * ldc + v * W, acc[m][v]);
  }
}

// c (+)= a . b, m rows of it in tiles of six and a last one of fewer.
inline void gemm(const float* a, int64_t lda, const float* b, float* c, int64_t ldc, int64_t m, int64_t kc,
                 bool accumulate) {
  static_assert(kTileRows == 6);
  for (; m >= 6; m -= 6, a += 6 * lda, c += 6 * ldc) gemm_tile<6>(a, lda, b, c, ldc, kc, accumulate);
  switch (m) {
    case 5: return gemm_tile<5>(a, lda, b, c, ldc, kc, accumulate);
    case 4: return gemm_tile<4>(a, lda, b, c, ldc, kc, accumulate);
    case 3: return gemm_tile<3>(a, lda, b, c, ldc, kc, accumulate);
    case 2: return gemm_tile<2>(a, lda, b, c, ldc, kc, accumulate);
    case 1: return gemm_tile<1>(a, lda, b, c, ldc, kc, accumulate);
    default: return;
  }
}

}  // namespace headrace::HEADRACE_ISA
