// A feed-forward of many experts, of which a router picks a few for every token (arXiv:1701.06538, arXiv:2101.03961):
// out = x + sum over the chosen of share * down(act(gate(norm(x))) * up(norm(x))).
//
// Tokens are grouped by expert, so that a step reads the rows of the chosen experts alone and a prefill reads every expert
// once. A token's experts are summed in the order of their numbers: its result has the same bits whatever tokens are
// beside it, however many threads run.
#pragma once

#include "kernels.h"
#include "linear.h"
#include "pool.h"

namespace headrace {

struct ExpertsCall {
  const float* x = nullptr;        // (M, E)
  int64_t rows = 0;                // M
  const float* norm = nullptr;     // (E) RMSNorm weight applied to x on its way in
  float eps = 0;
  Matrix router;                   // (X, E)
  Matrix gate, up, down;           // X matrices, one above the other: (F, E), (F, E) and (E, F) each
  int64_t active = 0;              // experts a token is given to
  bool normalized = false;         // their shares sum to one; else they are what softmax gives them among all
  Act act = Act::silu;
  float* out = nullptr;            // (M, E); may be x
  const LinearCall* next = nullptr; // as in LinearCall

  int64_t experts() const { return router.n; }
  int64_t inner() const { return gate.n / router.n; }
};

void run_experts(Pool& pool, const Kernels& kernels, const ExpertsCall& call);

}  // namespace headrace
