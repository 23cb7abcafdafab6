// Activations of gated units as nodes of MLX's lazy graph. Guard: tests/runtime/ops/test_native_recurrent.py.
#pragma once

#include <optional>
#include <string>

#include "mlx/array.h"

namespace headrace {

namespace mx = mlx::core;

// act(gate) * up, or act(gate): float32 arrays of the same shape. Throws std::invalid_argument for others.
mx::array gated(const mx::array& gate, const std::optional<mx::array>& up, const std::string& activation);

}  // namespace headrace
