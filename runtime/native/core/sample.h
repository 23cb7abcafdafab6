// A token from a row of logits: divided by the temperature, cut by top-k, top-p and min-p, drawn from what is left.
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

// The token of logits (n) that 53 bits of `random` draw, in the order of the vocabulary. Of equal logits at a cut the first
// stay. Where no logit is finite, the first of the largest; the first that is no number, where there is one, for whoever looks.
uint32_t sample(const Kernels& kernels, const float* logits, int64_t n, const SampleRule& rule, uint64_t random);

// The first of the largest, or the first that is no number.
uint32_t likeliest(const Kernels& kernels, const float* logits, int64_t n);

}  // namespace headrace
