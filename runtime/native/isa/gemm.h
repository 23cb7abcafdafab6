// Prefill's matrix product: panels of dequantized weights, k-major, and a register-blocked tile over them.
#pragma once

#include "matbatch.h"

namespace headrace::HEADRACE_ISA {

constexpr int kPanel = kPanelVectors * W;

// W rows of the panel's columns: dequantize each row into `rows_of_k`, then turn W x W squares. Values leave in the
// row's own order, so that activations need no rearranging.
template <class F>
inline void unpack_columns(const Matrix& w, int64_t row, int64_t rows, int64_t k0, int64_t kc, float* out) {
  alignas(64) float rows_of_k[W][kPanelDepth];
  const Groups<F> groups(w);
  const int64_t vectors = ceil_div(kc, F::kBlock) * F::kSteps;
  for (int64_t r = 0; r < W; ++r) {
    float* to = rows_of_k[r];
    if (r < rows) {
      const int64_t first_block = k0 / F::kBlock;
      TileReader<F, 1>(w, groups, row + r).walk(k0, k0 + kc, [&](int64_t b, int step, const vf(&v)[1]) {
        store(to + ((b - first_block) * F::kSteps + step) * W, v[0]);
      });
    } else {
      for (int64_t i = 0; i < vectors; ++i) store(to + i * W, zero());
    }
  }
  for (int64_t i = 0; i < vectors; ++i) {
    vf square[W];
    for (int r = 0; r < W; ++r) square[r] = load(rows_of_k[r] + i * W);
    transpose(square);
    const int64_t base = i / F::kSteps * F::kBlock;
    for (int lane = 0; lane < W; ++lane) {
      const int64_t k = base + F::source(static_cast<int>(i % F::kSteps), lane);
      if (k < kc) store(out + k * kPanel, square[lane]);
    }
  }
}

inline void unpack_panel(const Matrix& w, int64_t row, int64_t rows, int64_t k0, int64_t kc, int64_t column,
                         float* out) {
  with_format(w, [&](auto format) {
    for (int64_t r = 0; r < rows; r += W) {
      unpack_columns<decltype(format)>(w, row + r, rows - r, k0, kc, out + column + r);
    }
  });
}

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
