// Rows of a matrix as floats: the embedding of tokens, for every storage format.
//
// Guard: runtime/native/tests/projections.cpp (test_embedding); tests/runtime/ops/test_native_kernels.py.
#pragma once

#include <limits>

#include "kernels.h"

namespace headrace {

// out (count, K): row tokens[i] - first of w; `outside` for rows that w lacks. first: the token of w's first row, for one rank's part of
// the table.
void run_embed(const Matrix& w, const uint32_t* tokens, int64_t count, float* out, int64_t first = 0,
               float outside = std::numeric_limits<float>::quiet_NaN());

}  // namespace headrace
