// Recurrences, convolutions and activations as nodes of MLX's lazy graph: core/recurrent.h has shapes and formulas.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "mlx/array.h"

namespace headrace {

namespace mx = mlx::core;

// All float32. Returns (y, the new state). Throws std::invalid_argument for shapes that do not fit.
std::pair<mx::array, mx::array> recurrence(const mx::array& q, const mx::array& k, const mx::array& v, const mx::array& decay,
                                           const std::optional<mx::array>& beta, const mx::array& state);

// x (B, T + width - 1, C), weight (width, C), bias (C) -> (B, T, C).
mx::array convolve(const mx::array& x, const mx::array& weight, const std::optional<mx::array>& bias);

// act(gate) * up, or act(gate): arrays of the same shape.
mx::array gated(const mx::array& gate, const std::optional<mx::array>& up, const std::string& activation);

}  // namespace headrace
