// The second product of an adapter, B t, added to the rows of another product (core/linear.cpp).
//
// Interleaved rows: a lane belongs to a row of B, so nothing is summed across lanes. Guard: runtime/native/tests/projections.cpp.
#pragma once

#include "simd.h"

namespace headrace::HEADRACE_ISA {

template <Type T>
inline void add_factor_as(const Factor& b, const float* t, int64_t row, int64_t rows, float* y) {
  constexpr int kVectors = kBand / W;
  for (int64_t begin = row / kBand * kBand; begin < row + rows; begin += kBand) {  // rows of a band
    vf acc[kVectors];
    for (int v = 0; v < kVectors; ++v) acc[v] = zero();
    const int64_t at = begin * b.rank;
    for (int64_t j = 0; j < b.rank; ++j) {
      const vf factor = set1(t[j]);
      for (int v = 0; v < kVectors; ++v) acc[v] = fma(load_as<T>(b.data, at + j * kBand + v * W), factor, acc[v]);
    }
    if (begin >= row && begin + kBand <= row + rows) {
      for (int v = 0; v < kVectors; ++v) {
        float* to = y + (begin - row) + v * W;
        store(to, add(load(to), acc[v]));
      }
      continue;
    }
    alignas(64) float sums[kBand];
    for (int v = 0; v < kVectors; ++v) store(sums + v * W, acc[v]);
    for (int64_t i = 0; i < kBand; ++i) {
      if (begin + i >= row && begin + i < row + rows) y[begin + i - row] += sums[i];
    }
  }
}

// See Kernels::add_factor.
inline void add_factor(const Factor& b, const float* t, int64_t row, int64_t rows, float* y) {
  if (b.type == Type::f16) return add_factor_as<Type::f16>(b, t, row, rows, y);
  if (b.type == Type::bf16) return add_factor_as<Type::bf16>(b, t, row, rows, y);
  add_factor_as<Type::f32>(b, t, row, rows, y);
}

}  // namespace headrace::HEADRACE_ISA
