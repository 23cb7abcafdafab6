// Weights and caches in huge pages, every array aligned to a cache line.
//
// With 4 KiB pages a step misses the TLB for every page of the weights, and MLX's allocator puts arrays 8 bytes past a cache line, so
// that 64-byte loads touch two lines. Weights are moved once, at load.
//
// Guard: tests/runtime/ops/test_native_weights.py (slabs are filled and freed).
#pragma once

#include "mlx/allocator.h"
#include "mlx/array.h"

namespace headrace {

namespace mx = mlx::core;

// Functions that allocate throw std::bad_alloc if there is no memory. Those that take a shape throw
// std::invalid_argument for negative sizes, and for arrays of more than about 128 GiB.

// Uninitialised memory of MLX's allocator, for array::set_data. The allocator returns null if there is none; this
// throws std::bad_alloc instead, so every node's outputs go through it.
mx::allocator::Data allocated(size_t bytes);

// An uninitialised array in a slab that it shares with others.
mx::array in_huge_pages(const mx::Shape& shape, mx::Dtype dtype);

// Frees the slabs whose arrays are all freed, as the next array in huge pages does.
void free_unused_slabs();

// Zeros in separate memory, aligned to a cache line, in huge pages where whole ones fit.
mx::array zeros_on_lines(const mx::Shape& shape, mx::Dtype dtype);

// A copy of `a`, which must be evaluated and row-contiguous.
mx::array in_huge_pages(const mx::array& a);

}  // namespace headrace
