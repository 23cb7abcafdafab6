// Embedding lookup as a node of MLX's lazy graph.
#pragma once

#include <memory>

#include "matrix_handle.h"
#include "mlx/array.h"

namespace headrace {

// Rows of w. tokens (...) integers -> (..., K) float32; NaN for rows outside w.
mx::array embed(const mx::array& tokens, const std::shared_ptr<MatrixHandle>& w);

}  // namespace headrace
