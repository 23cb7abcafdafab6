// Layers with recurrent state: gated delta networks (arXiv:2412.06464), Mamba-2 (arXiv:2405.21060), short convolutions.
//
// Tokens are taken one by one, so that a token's bits depend neither on how a prompt is cut nor on other sequences.
#pragma once

#include "kernels.h"
#include "pool.h"

namespace headrace {

// Hv heads with a state S (Dv, Dk) each; Hk heads of q and k are shared evenly. Per token: S = S * decay + delta k^T, y = S q.
// delta is v, or with beta, by the delta rule, beta * (v - S k) with the decayed S.
struct RecurrenceCall {
  int64_t batch = 0, tokens = 0, key_heads = 0, heads = 0, dim = 0, rows = 0;  // B, T, Hk, Hv, Dk (a multiple of 16), Dv
  const float* q = nullptr;      // (B, T, Hk, Dk)
  const float* k = nullptr;
  const float* v = nullptr;      // (B, T, Hv, Dv)
  const float* decay = nullptr;  // (B, T, Hv), or with per_key (B, T, Hv, Dk)
  bool per_key = false;
  const float* beta = nullptr;   // (B, T, Hv) or nullptr
  const float* state = nullptr;  // (B, Hv, Dv, Dk)
  float* out = nullptr;          // (B, T, Hv, Dv)
  float* out_state = nullptr;
};

void run_recurrence(Pool& pool, const Kernels& kernels, const RecurrenceCall& call);

// out[b][t][c] = bias[c] + the sum over j of x[b][t + j][c] * weight[j][c].
struct ConvolutionCall {
  int64_t batch = 0, tokens = 0, channels = 0, width = 0;
  const float* x = nullptr;       // (B, T + width - 1, C)
  const float* weight = nullptr;  // (width, C)
  const float* bias = nullptr;    // (C) or nullptr
  float* out = nullptr;           // (B, T, C)
};

void run_convolution(Pool& pool, const Kernels& kernels, const ConvolutionCall& call);

// out = act(gate) * up over n values; act(gate) without up.
void run_gated(Pool& pool, const Kernels& kernels, const float* gate, const float* up, int64_t n, Act act, float* out);

}  // namespace headrace
