// Embedding lookup as a node of MLX's lazy graph. Guard: tests/runtime/ops/test_native_kernels.py.
#pragma once

#include <memory>
#include <optional>

#include "matrix_handle.h"
#include "mlx/array.h"

namespace headrace {

// Rows of w. tokens (...) integers -> (..., K) float32; NaN for rows outside w. first: the token of w's first row, if w is a part of the
// table; then rows outside w are zeros.
mx::array embed(const mx::array& tokens, const std::shared_ptr<MatrixHandle>& w, std::optional<int> first = std::nullopt);

}  // namespace headrace
