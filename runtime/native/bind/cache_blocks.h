// K/V memory of a pass's rows, for graph nodes that append to it. The arrays are no inputs of the nodes, since handles on all of them
// in every step cost more than a small model's attention. Nodes write in place in the order of evaluation; caches ensure that this
// is the order of the tokens.
//
// A block has kBlock (128) entries. B = batch, Hkv = key-value heads, D = head size. core/packed.h has the layout of packed blocks.
// Guard: tests/runtime/ops/test_passes.py, also for wrong tables and slabs; tests/fuzz/targets/kernels.py.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "../core/attend.h"
#include "mlx/array.h"

namespace headrace {

namespace mx = mlx::core;

// The rows of a pass with their blocks, kept alive until the last node has run.
struct CacheBlocks {
  std::vector<mx::array> arrays;           // the memory: two buffers, or slabs
  std::vector<std::vector<char*>> blocks;  // per sequence, in order of positions; nullptr for one that is missing
  std::vector<SequenceRows> sequences;
  std::vector<int64_t> whole_from;  // per sequence: first block from which on none is missing
  int64_t rows = 0;        // of all sequences
  Type type = Type::f32;   // of plain entries
  Packings packings;  // if they pack, blocks are bytes
  int64_t layers = 1, kv_heads = 0, dim = 0;

  CacheBlocks() = default;
  CacheBlocks(const CacheBlocks&) = delete;  // sequences point into blocks
};

// The blocks of one layer. Bytes: from a block's beginning to the layer's keys and to its values of the first head, and from head to head.
struct LayerBlocks {
  std::shared_ptr<const CacheBlocks> cache;
  int64_t keys_at = 0, values_at = 0, head_bytes = 0;

  // Sets the sequences, and where their keys and values are.
  void describe(AttendCall& call) const;
};

// One layer's keys and values (B, Hkv, capacity, D), whose first row is position `first`, for `length` more entries at `offset`.
// Evaluates the arrays. Throws std::invalid_argument unless they suit the plan, are row-contiguous, have room, and have all entries
// that the new tokens see.
LayerBlocks contiguous_blocks(const mx::array& keys, const mx::array& values, const AttendCall& plan, int batch, int length,
                              int offset, int first, Phase phase);

// A pass over several sequences, for all layers: runtime.ops.passes.Pass.
class Pass : public std::enable_shared_from_this<Pass> {
 public:
  using Tables = std::vector<std::vector<int>>;  // of one sequence: block ids, for each group of layers

  // slabs: per group of layers, arrays (blocks, layers, 2, Hkv, kBlock, D), or packed (blocks, layers, Hkv, bytes) for heads of `dims`.
  // Throws std::invalid_argument for wrong shapes or types, tables that are too short, and unknown blocks.
  Pass(const std::vector<int>& counts, const std::vector<int>& offsets, const std::vector<bool>& prefill,
       const std::vector<Tables>& tables, const std::vector<std::vector<mx::array>>& slabs, const Packings& packings = {},
       const std::vector<int>& dims = {});

  // Throws std::invalid_argument for an unknown layer, a shape other than the plan's, or missing visible entries.
  LayerBlocks layer(int group, int index, const AttendCall& plan) const;

  int64_t rows() const { return rows_; }
  const std::vector<int>& counts() const { return counts_; }  // rows of each sequence
  const std::vector<uint8_t>& of_prompts() const { return of_prompts_; }  // 1 for each row of phase prefill; empty without any

 private:
  std::vector<int> counts_;
  std::vector<uint8_t> of_prompts_;
  int64_t rows_ = 0;
  std::vector<std::shared_ptr<const CacheBlocks>> groups_;
};

// Packings by bits and numbers per scale. Throws std::invalid_argument for unsupported ones.
Packings packings_of(int key_bits, int key_group, int value_bits, int value_group);

// Writes entries (layers, 2, Hkv, n, D) to the first n rows of one slab's block, at once, or all of a packed one (layers, Hkv, bytes).
// Throws std::invalid_argument for wrong shapes.
void write_block(const mx::array& slab, int block, const mx::array& entries);

// A packed block (layers, Hkv, bytes) of heads of size `dim` with zeros behind its first `entries`. Throws std::invalid_argument for
// wrong sizes.
mx::array cut_block(const mx::array& block, int entries, const Packings& packings, int dim);

// A copy of the buffer (B, Hkv, entries, D) with room for `capacity` entries, zeros behind its own. Throws std::invalid_argument for
// other shapes.
mx::array grow_buffer(const mx::array& buffer, int capacity);

}  // namespace headrace
