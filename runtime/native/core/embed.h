// Rows of a matrix as floats: the embedding of tokens, for every storage format.
#pragma once

#include "kernels.h"

namespace headrace {

// out (count, K): row tokens[i] of w; NaN for rows outside w.
void run_embed(const Matrix& w, const uint32_t* tokens, int64_t count, float* out);

}  // namespace headrace
