// Token selection from a row of logits: temperature, top-k, top-p, min-p, then a sample.
//
// Guard: runtime/native/tests/sampling.cpp; tests/runtime/ops/test_native_sampling.py.
#pragma once

#include "kernels.h"

namespace headrace {

// The stages, as runtime/sampling/sampler.py defines them.
struct SampleRule {
  float temperature = 1;  // above 0
  int64_t top_k = 0;      // 0: all
  double top_p = 1;       // 1: all
  float min_p = 0;        // 0: all
};

// The token of logits (n) sampled with the highest 53 bits of `random`, in vocabulary order. Of equal logits at a cut
// the first stay. With a NaN, the first NaN or plus infinity, after the division by the temperature; without one, the
// first maximum if that is infinite.
uint32_t sample(const Kernels& kernels, const float* logits, int64_t n, const SampleRule& rule, uint64_t random);

// The first maximum; with a NaN, the first NaN or plus infinity.
uint32_t likeliest(const Kernels& kernels, const float* logits, int64_t n);

}  // namespace headrace
