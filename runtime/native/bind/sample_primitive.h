// Token selection as a node of MLX's lazy graph.
#pragma once

#include <optional>

#include "mlx/array.h"

namespace headrace {

namespace mx = mlx::core;

// logits (B, V) float32, keys (B, 2) uint32 of MLX's random state, 64 random bits a row -> tokens (B) uint32: see core/sample.h.
// Without keys the likeliest. Throws std::invalid_argument for other shapes and types.
mx::array sample_tokens(const mx::array& logits, const std::optional<mx::array>& keys, float temperature, int top_k,
                        double top_p, float min_p);

}  // namespace headrace
