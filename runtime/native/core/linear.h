// Projections: out = epilogue(norm(x) @ w.T), split among threads.
//
// One row streams the weights (decode); several share them. Rows do not affect each other. M = rows, K and N as in kernels.h.
//
// Guard: runtime/native/tests/projections.cpp and rows.cpp (norms); tests/runtime/ops/test_native_kernels.py, test_native_row_bits.py,
// test_coarse_activations.py (8 bits) and test_tiles.py (halves).
#pragma once

#include "kernels.h"
#include "pool.h"

namespace headrace {

struct LinearCall {
  const float* x = nullptr;         // (M, K)
  int64_t rows = 0;                 // M
  const float* norm = nullptr;      // (K) RMSNorm weight applied to x first, or nullptr
  float eps = 0;
  Matrix w;                         // (N, K)
  const float* residual = nullptr;  // (M, N) added to the product, or nullptr
  Curve curve;                      // of Act::xielu
  Act act = Act::none;              // if it gates, w is F gate rows above F up rows and out is (M, F)
  float* out = nullptr;             // (M, N); may be residual, never x
  int64_t stride = 0;               // numbers between rows of out, where they are parts of wider ones; 0: N
  const uint8_t* prompts = nullptr; // (M) whether a row is rounded to `rounding`, not to 16 bits, where w.rounds(); nullptr: no row is
  int rounding = 8;                 // 8 or kHalves, the latter only for weights that fit tiles; see Matrix
  const LinearCall* next = nullptr; // the next call, for prefetch (`w` and `act` only), or nullptr
};

// Replaces n values by max(x, 0)^2.
inline void square_positive(float* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] = x[i] < 0 ? 0 : x[i] * x[i];  // keeps NaN
}

// A thread's first weights in the next call; empty without one.
Upcoming first_of(const Pool& pool, const LinearCall* next, int number);

void run_linear(Pool& pool, const Kernels& kernels, const LinearCall& call);

constexpr int64_t kAloneNumbers = 1 << 14;  // numbers of rows that the caller handles alone

// out[m] = x[m] normalised, (M, K).
void run_rms_norm(Pool& pool, const Kernels& kernels, const float* x, int64_t rows, int64_t k, const float* norm,
                  float eps, float* out);

// out[m] = x[m] after LayerNorm, (M, K); bias may be nullptr.
void run_layer_norm(Pool& pool, const Kernels& kernels, const float* x, int64_t rows, int64_t k, const float* norm,
                    const float* bias, float eps, float* out);

// out[m] = (residual[m] + x[m] normalised) * scale, (M, K); out may be residual.
struct NormAddCall {
  const float* x = nullptr;
  int64_t rows = 0, k = 0;
  const float* norm = nullptr;
  float eps = 0;
  const float* residual = nullptr;
  float scale = 1.0f;
  float* out = nullptr;
};

void run_norm_add(Pool& pool, const Kernels& kernels, const NormAddCall& call);

}  // namespace headrace
