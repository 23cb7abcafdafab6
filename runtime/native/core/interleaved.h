// Interleaved layout of matrices for rounded activations (isa/bands.cpp).
//
// A band has kBand rows: word k of all its rows, then word k + 1: (bands, words, kBand). Scales and offsets: (bands, groups, kBand).
// Rows beyond N are zeros.
#pragma once

#include <algorithm>

#include "kernels.h"
#include "pool.h"

namespace headrace {

inline int64_t bands(int64_t rows) { return (rows + kBand - 1) / kBand; }

// to (bands, columns, kBand) from (rows, columns).
template <class T>
void interleave(Pool& pool, const T* from, int64_t rows, int64_t columns, T* to) {
  constexpr int64_t kAtOnce = 64 / sizeof(T);  // columns: a cache line of every row
  pool.run(bands(rows), [&](Tasks& tasks) {
    while (tasks.next()) {
      const int64_t row = tasks.index() * kBand, here = std::min(kBand, rows - row);
      const T* band = from + row * columns;
      T* out = to + row * columns;
      if (here < kBand) std::fill(out, out + kBand * columns, T{0});
      for (int64_t begin = 0; begin < columns; begin += kAtOnce) {
        const int64_t end = std::min(columns, begin + kAtOnce);
        for (int64_t lane = 0; lane < here; ++lane) {
          for (int64_t c = begin; c < end; ++c) out[c * kBand + lane] = band[lane * columns + c];
        }
      }
    }
  });
}

}  // namespace headrace
