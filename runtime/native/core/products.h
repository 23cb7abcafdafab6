// What every split of a product among threads ends in.
#pragma once

#include <algorithm>

#include "kernels.h"

namespace headrace {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Activation rows that one call of `multiply_rows` takes: as many as share a band of weights while the cache holds it, and
// more in floats, where weights are unpacked for each call.
inline int64_t most_rows(const Matrix& w) { return w.rounds() ? 64 : 512; }

// y[m * ldy + r] for m < batch <= most_rows(w) prepared rows and weight rows [row, row + rows).
inline void multiply_rows(const Kernels& kernels, const Matrix& w, const float* prepared, int64_t stride, int64_t batch,
                          int64_t row, int64_t rows, float* y, int64_t ldy, const Upcoming& next) {
  if (w.rounds()) {
    kernels.multiply(w, prepared, stride, batch, row, rows, y, ldy, next);
  } else {
    kernels.multiply_floats(w, prepared, stride, batch, row, rows, y, ldy);
  }
}

}  // namespace headrace
