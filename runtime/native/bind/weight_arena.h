// Weights and caches side by side in huge pages, every array on a cache line of its own.
//
// A decode step reads all weights once, so with 4 KiB pages it misses the TLB some 24,000 times; and MLX's allocator puts
// an array 8 bytes past a line, so that every 64-byte load touches two. Moving the weights once, at load, is worth
// about a tenth of a step.
#pragma once

#include "mlx/array.h"

namespace headrace {

namespace mx = mlx::core;

// An array whose contents are yet to be written. Slabs belong to the arrays in them and go with the last one.
mx::array in_huge_pages(const mx::Shape& shape, mx::Dtype dtype);

// Zeros in memory of their own, which begins on a cache line; what it has of whole huge pages is asked for as such.
mx::array zeros_on_lines(const mx::Shape& shape, mx::Dtype dtype);

// A copy of `a`, which must be evaluated and row-contiguous.
mx::array in_huge_pages(const mx::array& a);

}  // namespace headrace
