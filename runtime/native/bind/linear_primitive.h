// Projections and norms as nodes of MLX's lazy graph.
//
// Guard: tests/runtime/ops/test_native_kernels.py; test_coarse_activations.py and test_tiles.py for other roundings.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "experts_primitive.h"
#include "matrix_handle.h"
#include "mlx/array.h"

namespace headrace {

// act(norm(x) @ w.T) (+ residual). x (..., K) float32 -> (..., N), or (..., N / 2) with a gated activation. rounding: see
// Matrix; halves only with tiles, and where w fits them.
// Throws std::invalid_argument for another.
mx::array linear(const mx::array& x, const std::shared_ptr<MatrixHandle>& w, const std::optional<mx::array>& norm,
                 float eps, const std::optional<mx::array>& residual, const std::string& activation, int rounding = 16,
                 const CurveNumbers& curve = std::nullopt);

// RMSNorm over the last axis of a float32 array.
mx::array rms_norm(const mx::array& x, const mx::array& weight, float eps);

// LayerNorm over the last axis of a float32 array.
mx::array layer_norm(const mx::array& x, const mx::array& weight, const std::optional<mx::array>& bias, float eps);

}  // namespace headrace
