// Mixture of experts; a router picks a few for every token (arXiv:1701.06538, arXiv:2101.03961):
// out = x + sum over the chosen of share * down(act(gate(norm(x))) * up(norm(x))).
//
// Tokens are grouped by expert: a step reads the chosen experts only, a prefill reads each once. A token's experts are summed in
// index order, so its bits do not depend on other tokens or the number of threads.
//
// M = tokens, E = width of the layer, F = inner size of an expert, X = number of experts. Guard: runtime/native/tests/experts.cpp;
// tests/runtime/ops/test_native_experts.py.
#pragma once

#include <utility>

#include "kernels.h"
#include "linear.h"
#include "pool.h"

namespace headrace {

// Choice of experts and their shares: runtime.ops.weights.Mixture.
struct RouterRule {
  bool sigmoid = false;                 // scores; else the softmax
  float scale = 1.0f;                   // of shares
  std::pair<int, int> groups{1, 1};     // of experts, and how many of them take part,
  int best = 2;                         // by the sum of their so many largest ranks, 1 or 2
  bool before = false;                  // shares multiply the experts' input, not their output
  const float* correction = nullptr;    // (X) added to scores for the choice, or nullptr
  const float* expert_scale = nullptr;  // (X) multiplies shares at last, or nullptr

  bool plain() const { return !sigmoid && correction == nullptr && groups.second >= groups.first; }
};

struct ExpertsCall {
  const float* x = nullptr;        // (M, E)
  int64_t rows = 0;                // M
  const float* norm = nullptr;     // (E) RMSNorm weight
  float eps = 0;
  const float* router_norm = nullptr;  // (E) of the router's input; nullptr: the same
  bool residual = true;            // x is added; else out is not x
  Matrix router;                   // (X, E)
  Matrix gate, up, down;           // stacks of X: (F, E), (F, E) and (E, F) each; no gate if the activation has none
  int64_t active = 0;              // experts per token
  bool normalized = false;         // shares are divided by their sum
  RouterRule rule;
  Act act = Act::silu;
  float* out = nullptr;            // (M, E); may be x
  const LinearCall* next = nullptr; // as in LinearCall

  int64_t experts() const { return router.n; }
  int64_t inner() const { return up.n / router.n; }
};

void run_experts(Pool& pool, const Kernels& kernels, const ExpertsCall& call);

// Products of rows with matrices of a stack that were chosen for them. NaN for experts outside the stack.
struct ExpertProducts {
  const float* x = nullptr;         // (pairs / active, K)
  const int32_t* chosen = nullptr;  // (pairs)
  int64_t pairs = 0;
  int64_t active = 1;               // pairs of a row of x
  Matrix w;                         // a stack of `experts`: (N, K) each
  int64_t experts = 0;
  float* out = nullptr;             // (pairs, N)

  int64_t width() const { return w.n / experts; }
};

void run_expert_products(Pool& pool, const Kernels& kernels, const ExpertProducts& call);

}  // namespace headrace
