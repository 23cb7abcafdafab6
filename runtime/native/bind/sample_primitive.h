// Token selection as a node of MLX's lazy graph. Guard: tests/runtime/ops/test_native_sampling.py.
#pragma once

#include <cstdint>
#include <vector>

#include "../core/sample.h"
#include "mlx/array.h"

namespace headrace {

namespace mx = mlx::core;

// Token selection of a row: greedy at temperature 0, else sampled with the highest 53 of 64 random bits.
struct SampleRow {
  SampleRule rule;
  uint64_t random = 0;
};

// logits (B, V) float32, one rule per row, or none for greedy -> tokens (B) uint32: see core/sample.h.
// Throws std::invalid_argument for other shapes and types.
mx::array sample_tokens(const mx::array& logits, std::vector<SampleRow> rows);

}  // namespace headrace
