// Products of prepared rows with a range of weight rows, by the kernel for the matrix's format. linear.cpp and
// experts.cpp are the callers, and their tests the guards. gated.cpp and mixer.cpp include this for ceil_div alone.
#pragma once

#include <algorithm>

#include "kernels.h"

namespace headrace {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Activation rows of one `multiply_rows` call. The kernels take any number; more rows need more memory for a task's
// products. Up to 64 rows (kMostSlabRows of isa/bands.cpp, too) share a band of weights in the cache. In floats and
// halves each call unpacks the weights anew, so 512 rows share that work.
inline int64_t most_rows(const Matrix& w) { return w.rounds() && w.rounding != kHalves ? 64 : 512; }

// y[m * ldy + r] for m < batch <= most_rows(w) prepared rows, `stride` floats apart (at least Kernels::prepared_size(w)), and weight rows
// [row, row + rows). next: as in Kernels::multiply.
inline void multiply_rows(const Kernels& kernels, const Matrix& w, const float* prepared, int64_t stride, int64_t batch,
                          int64_t row, int64_t rows, float* y, int64_t ldy, const Upcoming& next) {
  if (w.rounds() && w.rounding == kHalves) {
    kernels.multiply_tiles(w, prepared, stride, batch, row, rows, y, ldy);
  } else if (w.rounds()) {
    kernels.multiply(w, prepared, stride, batch, row, rows, y, ldy, next);
  } else {
    kernels.multiply_floats(w, prepared, stride, batch, row, rows, y, ldy);
  }
}

}  // namespace headrace
