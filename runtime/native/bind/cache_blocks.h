// Where the rows of a pass find their K/V, for graph nodes that append to it. The arrays are no inputs of the nodes: MLX would make
// new handles on all of them in every step, which costs a small model's step more than its attention. Nodes write to them in place
// and in the order in which they are evaluated; that this is the order of the tokens is for the caches to see to.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "../core/attend.h"
#include "mlx/array.h"

namespace headrace {

namespace mx = mlx::core;

// The rows of all sequences of a pass, and the blocks of each, in memory that is held until the last node has run.
struct CacheBlocks {
  std::vector<mx::array> arrays;
  std::vector<std::vector<char*>> blocks;  // of each sequence
  std::vector<SequenceRows> sequences;
  std::vector<int64_t> whole_from;  // of each sequence: from this block on none is missing
  int64_t rows = 0;
  Type type = Type::f32;
  Packings packings;  // if they pack, blocks are bytes
  int64_t layers = 1, kv_heads = 0, dim = 0;

  CacheBlocks() = default;
  CacheBlocks(const CacheBlocks&) = delete;  // sequences point into blocks
};

// Those of one layer.
struct LayerBlocks {
  std::shared_ptr<const CacheBlocks> cache;
  int64_t keys_at = 0, values_at = 0, head_bytes = 0;

  void describe(AttendCall& call) const;
};

// One layer's keys and values (B, Hkv, capacity, D), whose first row is position `first`, for `length` more entries at `offset`.
// Evaluates what is not. Throws std::invalid_argument unless the arrays suit the plan, are row-contiguous, have room and still have
// what the new tokens see.
LayerBlocks contiguous_blocks(const mx::array& keys, const mx::array& values, const AttendCall& plan, int batch, int length,
                              int offset, int first, Phase phase);

// What one pass over several sequences needs to know, for all layers: see runtime.ops.passes.Pass.
class Pass : public std::enable_shared_from_this<Pass> {
 public:
  using Tables = std::vector<std::vector<int>>;  // of one sequence: block ids, for each group of layers

  // slabs: for each group of layers, arrays (blocks, layers, 2, Hkv, kBlock, D), or, where K/V are packed, (blocks, layers, Hkv, bytes)
  // for heads of `dim`. Throws std::invalid_argument where shapes or types do not fit, or a table is too short or names a block that
  // no slab has.
  Pass(const std::vector<int>& counts, const std::vector<int>& offsets, const std::vector<bool>& prefill,
       const std::vector<Tables>& tables, const std::vector<std::vector<mx::array>>& slabs, const Packings& packings = {},
       int dim = 0);

  // Throws std::invalid_argument where the group has no such layer, has another shape than the plan, or lacks what rows see.
  LayerBlocks layer(int group, int index, const AttendCall& plan) const;

  int64_t rows() const { return groups_.empty() ? 0 : groups_[0]->rows; }

 private:
  std::vector<std::shared_ptr<const CacheBlocks>> groups_;
};

// How people's formats are packed: bits, and the numbers that share a scale. Throws std::invalid_argument for what the kernels do not
// know.
Packings packings_of(int key_bits, int key_group, int value_bits, int value_group);

// Writes entries (layers, 2, Hkv, n, D) to the first n rows of one slab's block, at once, or all of a packed one (layers, Hkv, bytes).
// Throws std::invalid_argument where they do not fit.
void write_block(const mx::array& slab, int block, const mx::array& entries);

// A packed block (layers, Hkv, bytes) of heads of size `dim` with its first `entries`, and zeros behind them. Throws
// std::invalid_argument where sizes do not fit.
mx::array cut_block(const mx::array& block, int entries, const Packings& packings, int dim);

// The buffer (B, Hkv, entries, D) with room for `capacity` entries: a copy, zeros beyond what it had, in memory of its own. Throws
// std::invalid_argument for other shapes.
mx::array grow_buffer(const mx::array& buffer, int capacity);

}  // namespace headrace
