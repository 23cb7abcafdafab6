// Numbers as the sum of two bfloat16 numbers, high + low, for AMX's tiles (tiles.cpp). Only with AVX-512.
//
// x = high + low within 2^-17 of its magnitude. high * high + high * low + low * high, summed in float32, is a product within about 2^-15.
// Infinities and NaN have NaN for their low part.
//
// Guard: runtime/native/tests/projections.cpp (kHalves); tests/runtime/ops/test_tiles.py.
#pragma once

#include "rounded.h"

namespace headrace::HEADRACE_ISA {

// Pairs (a, b) lane by lane: returns their high parts, rounded to nearest, a's in the lower 16 bits; a and b become what is left of them.
inline vi split(vf& a, vf& b) {
  const vi half = _mm512_set1_epi32(0x8000), upper = _mm512_set1_epi32(-65536);
  const vi high_a = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(a), half), upper);
  const vi high_b = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(b), half), upper);
  a = sub(a, _mm512_castsi512_ps(high_a));
  b = sub(b, _mm512_castsi512_ps(high_b));
  return _mm512_or_si512(_mm512_srli_epi32(high_a, 16), high_b);
}

// out (K floats, as dwords): the high parts of all K / 2 pairs of values, then the low ones. x (K); pairs are those of Pairs<F>.
template <class F>
inline void halve_row(const Matrix& w, const float* x, float* out) {
  const std::make_integer_sequence<int, W> lanes;
  constexpr int kRun = Pairs<F>::kWords;
  for (int64_t i = 0; i < w.k; i += 2 * W) {
    const vf one = load(x + i), two = load(x + i + W);
    vf a = every_other<kRun, 0>(one, two, lanes), b = every_other<kRun, 1>(one, two, lanes);
    store_words(out + i / 2, split(a, b));
    store_words(out + (w.k + i) / 2, split(a, b));
  }
}

}  // namespace headrace::HEADRACE_ISA
