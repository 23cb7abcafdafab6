// The K/V buffers that graph nodes append to. They are no inputs of the nodes: MLX would make new handles on all of them in
// every step, which costs a small model's step more than its attention. Nodes write to them in place and in the order in
// which they are evaluated; that this is the order of the tokens is for runtime.cache to see to.
#pragma once

#include <cstdint>

#include "../core/attend.h"
#include "mlx/array.h"

namespace headrace {

namespace mx = mlx::core;

// The buffer (B, Hkv, entries, D) with room for `capacity` entries: a copy, zeros beyond what it had, in memory of its own. Throws
// std::invalid_argument for other shapes.
mx::array grow_buffer(const mx::array& buffer, int capacity);

// One layer's keys and values (B, Hkv, capacity, D), held until the node that appends to them has run.
class CacheBuffers {
 public:
  // Evaluates what is not. Throws std::invalid_argument unless the arrays suit the plan, are row-contiguous, have room for
  // `length` more entries at `offset` and still have what those see: their first row is position `first`.
  CacheBuffers(const mx::array& keys, const mx::array& values, const AttendCall& plan, int batch, int length, int offset,
               int first);

  // Where the buffers are and how they are stored.
  void describe(AttendCall& call) const;

 private:
  mx::array keys_, values_;
  int first_;
};

}  // namespace headrace
