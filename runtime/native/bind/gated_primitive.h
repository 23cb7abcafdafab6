// Activations of gated units as nodes of MLX's lazy graph. Guard: tests/runtime/ops/test_native_recurrent.py.
#pragma once

#include <optional>
#include <string>

#include "mlx/array.h"

namespace headrace {

namespace mx = mlx::core;

// act(gate) * up, or act(gate): float32 arrays of the same shape. Throws std::invalid_argument for others.
//
// activation: "silu", "gelu", "sigmoid", or "clamped" with up. Callers must pass one of these: "relu2" and
// "xielu" gate nothing, but `activation_of` accepts them, and the kernel would compute the sigmoid for both.
mx::array gated(const mx::array& gate, const std::optional<mx::array>& up, const std::string& activation);

}  // namespace headrace
