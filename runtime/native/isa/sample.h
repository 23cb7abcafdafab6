// Passes over a row of logits, for core/sample.cpp. n is a multiple of kScorePad.
//
// Guard: runtime/native/tests/sampling.cpp; tests/runtime/ops/test_native_sampling.py.
#pragma once

#include "simd.h"

namespace headrace::HEADRACE_ISA {

// out = x / divisor; returns the maximum, NaN if any is.
inline float divided(const float* x, int64_t n, float divisor, float* out) {
  vf highest = set1(-__builtin_inff()), total = zero();
  for (int64_t i = 0; i < n; i += W) {
    const vf here = div(load(x + i), set1(divisor));
    store(out + i, here);
    highest = max(here, highest);
    total = fma(here, set1(0x1p-64f), total);  // so small that no sum of finite numbers becomes infinite
  }
  const float spoiled = sum(total);  // of infinities of both signs, too
  return spoiled == spoiled ? maximum(highest) : spoiled;
}

// out = e^(x - top), 0 for NaN; returns the sum.
inline float exponentials(const float* x, int64_t n, float top, float* out) {
  vf total = zero();
  for (int64_t i = 0; i < n; i += W) {
    const vf from = load(x + i), here = where_above(from, -__builtin_inff(), exp(sub(from, set1(top))));
    store(out + i, here);
    total = add(total, here);
  }
  return sum(total);
}

// Count and weight of x above the limit.
inline Share share_above(const float* x, const float* weights, int64_t n, float limit) {
  vf count = zero(), mass = zero();
  for (int64_t i = 0; i < n; i += W) {
    const vf here = load(x + i);
    count = add(count, where_above(here, limit, set1(1.0f)));
    mass = add(mass, where_above(here, limit, load(weights + i)));
  }
  return {sum(count), sum(mass)};
}

}  // namespace headrace::HEADRACE_ISA
