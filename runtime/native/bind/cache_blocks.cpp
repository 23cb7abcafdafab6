// K/V memory of a pass's rows: checks of shapes and tables, and pointers to every block (cache_blocks.h).
#include "cache_blocks.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "matrix_handle.h"
#include "weight_arena.h"

namespace headrace {
namespace {

void require(bool fits, const char* what) {
  if (!fits) throw std::invalid_argument(what);
}

// Keep an array alive with the cache; returns it, evaluated. The caller has reserved cache.arrays, so references stay valid.
const mx::array& hold(CacheBlocks& cache, const mx::array& array) {
  cache.arrays.push_back(array);
  mx::array& held = cache.arrays.back();
  if (!held.is_available()) held.eval();
  require(held.flags().row_contiguous, "keys and values must be row-contiguous");
  return held;
}

// Append a sequence, whose rows follow those so far. Pointers to blocks stay valid: inner vectors keep their memory when the outer one
// grows.
void add(CacheBlocks& cache, SequenceRows rows, std::vector<char*> blocks, int64_t whole_from) {
  rows.row = cache.rows;
  rows.blocks = blocks.data();
  cache.rows += rows.count;
  cache.blocks.push_back(std::move(blocks));
  cache.sequences.push_back(rows);
  cache.whole_from.push_back(whole_from);
}

int64_t blocks_for(int64_t entries) { return (entries + kBlock - 1) / kBlock; }

// Bytes of a head's packed block: its keys, then its values.
int64_t head_bytes(const Packings& packings, int64_t dim) {
  return PackedPart(packings.keys, dim).bytes + PackedPart(packings.values, dim).bytes;
}

}  // namespace

void LayerBlocks::describe(AttendCall& call) const {
  call.sequences = cache->sequences.data();
  call.count = static_cast<int64_t>(cache->sequences.size());
  call.kv_type = cache->type;
  call.packings = cache->packings;
  call.keys_at = keys_at;
  call.values_at = values_at;
  call.head_bytes = head_bytes;
}

LayerBlocks contiguous_blocks(const mx::array& keys, const mx::array& values, const AttendCall& plan, int batch, int length,
                              int offset, int first, Phase phase) {
  require(keys.ndim() == 4 && keys.shape() == values.shape() && keys.dtype() == values.dtype() &&
              keys.shape(0) == batch && keys.shape(1) == plan.kv_heads && keys.shape(3) == plan.dim,
          "keys and values must be (B, Hkv, capacity, D)");
  const int64_t end = int64_t{offset} + length;
  require(first >= 0 && offset >= first && end - first <= keys.shape(2),
          "the cache has no room for these tokens");
  require(first <= first_seen(plan, offset), "the cache has dropped what these tokens see");
  auto cache = std::make_shared<CacheBlocks>();
  cache->type = type_of(keys.dtype());
  cache->arrays.reserve(2);
  char* base = const_cast<char*>(hold(*cache, keys).data<char>());
  const int64_t apart = hold(*cache, values).data<char>() - base;  // from keys to values, the same for every block
  const int64_t row_bytes = plan.dim * size_of(cache->type), head_bytes = row_bytes * keys.shape(2);
  for (int64_t b = 0; b < batch; ++b) {
    std::vector<char*> blocks(static_cast<size_t>(blocks_for(end)));
    for (size_t i = 0; i < blocks.size(); ++i) {
      // Row r of block i is position i * kBlock + r, which is row i * kBlock + r - first of the buffer. Blocks that begin before position
      // `first` so begin before the buffer. Their rows there are not read: no query sees an entry before `first` (checked above for the
      // first one, and first_seen grows with the position), and groups of entries are cut at SequenceRows::first (first_met).
      blocks[i] = base + b * plan.kv_heads * head_bytes + (static_cast<int64_t>(i) * kBlock - first) * row_bytes;
    }
    add(*cache, {.count = length, .offset = offset, .phase = phase, .first = first}, std::move(blocks), 0);
  }
  return {std::move(cache), 0, apart, head_bytes};
}

Pass::Pass(const std::vector<int>& counts, const std::vector<int>& offsets, const std::vector<bool>& prefill,
           const std::vector<Tables>& tables, const std::vector<std::vector<mx::array>>& slabs, const Packings& packings,
           const std::vector<int>& dims) {
  // Arguments for each sequence and group.
  require(offsets.size() == counts.size() && prefill.size() == counts.size() && tables.size() == counts.size(),
          "every sequence needs a count, an offset, a phase and tables");
  counts_ = counts;
  for (const int count : counts) rows_ += count;
  require(packings.keys.bits == 0 || dims.size() == slabs.size(), "packed groups have a head size each");
  for (size_t group = 0; group < slabs.size(); ++group) {
    // The sizes of a group, from its first slab: plain (blocks, layers, 2, Hkv, kBlock, D), or packed (blocks, layers, Hkv, bytes).
    auto cache = std::make_shared<CacheBlocks>();
    require(!slabs[group].empty(), "a group of layers has no slabs");
    const mx::Shape& shape = slabs[group][0].shape();
    const mx::Dtype dtype = slabs[group][0].dtype();
    cache->packings = packings;
    require(shape.size() == (packings.keys.bits != 0 ? 4 : 6), "slabs have 6 dimensions, packed ones 4");
    cache->layers = shape[1];
    if (packings.keys.bits != 0) {
      const int dim = dims[group];
      require(dtype == mx::uint8 && dim > 0 && dim % 16 == 0 && shape[3] == head_bytes(packings, dim),
              "packed slabs must be (blocks, layers, Hkv, bytes of 128 entries)");
      cache->kv_heads = shape[2];
      cache->dim = dim;
    } else {
      require(shape[2] == 2 && shape[4] == kBlock, "slabs must be (blocks, layers, 2, Hkv, 128, D)");
      cache->type = type_of(dtype);
      cache->kv_heads = shape[3];
      cache->dim = shape[5];
    }

    // Pointers to the blocks of all slabs: a block id counts through the slabs in order.
    cache->arrays.reserve(slabs[group].size());
    int64_t block_bytes = slabs[group][0].itemsize();
    for (size_t axis = 1; axis < shape.size(); ++axis) block_bytes *= shape[axis];
    std::vector<char*> all;
    for (const mx::array& slab : slabs[group]) {
      require(slab.ndim() == shape.size() && slab.dtype() == dtype && std::equal(shape.begin() + 1, shape.end(), slab.shape().begin() + 1),
              "the slabs of a group must be alike");
      char* base = const_cast<char*>(hold(*cache, slab).data<char>());
      for (int64_t i = 0; i < slab.shape(0); ++i) all.push_back(base + i * block_bytes);
    }

    // Each sequence's blocks, by its table. An id below 0 is a block that was dropped: its pointer stays null. `layer` checks that no row
    // of the sequence sees it or a block before it, since that depends on the layer's window.
    for (size_t i = 0; i < counts.size(); ++i) {
      require(counts[i] >= 1 && offsets[i] >= 0, "a sequence has one row or more, at a position");
      require(tables[i].size() == slabs.size(), "a sequence needs a table for every group of layers");
      const std::vector<int>& ids = tables[i][group];
      const auto needed = static_cast<size_t>(blocks_for(int64_t{offsets[i]} + counts[i]));
      require(ids.size() >= needed, "block table is too short for its sequence");
      std::vector<char*> blocks(needed, nullptr);
      int64_t whole_from = 0;
      for (size_t at = 0; at < needed; ++at) {
        require(ids[at] < static_cast<int64_t>(all.size()), "block table has an unknown block");
        if (ids[at] < 0) {
          whole_from = static_cast<int64_t>(at) + 1;
        } else {
          blocks[at] = all[static_cast<size_t>(ids[at])];
        }
      }
      add(*cache,
          {.count = counts[i], .offset = offsets[i], .phase = prefill[i] ? Phase::prefill : Phase::decode},
          std::move(blocks), whole_from);
    }
    groups_.push_back(std::move(cache));
  }

  // A mark for each row of a prompt, if there is any.
  if (std::find(prefill.begin(), prefill.end(), true) == prefill.end()) return;
  for (size_t i = 0; i < counts.size(); ++i) {  // last: the tables bound the counts
    of_prompts_.insert(of_prompts_.end(), static_cast<size_t>(counts[i]), prefill[i] ? 1 : 0);
  }
}

LayerBlocks Pass::layer(int group, int index, const AttendCall& plan) const {
  require(group >= 0 && static_cast<size_t>(group) < groups_.size(), "a pass has no such group of layers");
  const std::shared_ptr<const CacheBlocks>& cache = groups_[static_cast<size_t>(group)];
  require(index >= 0 && index < cache->layers, "a group has no such layer");
  require(cache->kv_heads == plan.kv_heads && cache->dim == plan.dim, "the slabs do not fit the attention");
  for (size_t i = 0; i < cache->sequences.size(); ++i) {
    require(cache->whole_from[i] <= first_seen(plan, cache->sequences[i].offset) / kBlock,
            "block table lacks a block that its sequence sees");
  }
  // Offsets from the beginning of a block, in bytes. Packed: (layers, Hkv, keys then values). Plain: (layers, 2, Hkv, kBlock, D).
  if (cache->packings.keys.bits != 0) {
    const int64_t each = head_bytes(cache->packings, cache->dim), keys_at = index * cache->kv_heads * each;
    return {cache, keys_at, keys_at + PackedPart(cache->packings.keys, cache->dim).bytes, each};
  }
  const int64_t each = kBlock * cache->dim * size_of(cache->type), half = cache->kv_heads * each;
  return {cache, 2 * index * half, (2 * index + 1) * half, each};
}

Packings packings_of(int key_bits, int key_group, int value_bits, int value_group) {
  const bool keys = (key_bits == 8 && key_group == 32) || (key_bits == 6 && key_group == 64);
  const bool values = (value_bits == 5 && value_group == 64) || ((value_bits == 8 || value_bits == 4) && value_group == 32);
  require(keys, "keys are packed to 8 bits in groups of 32, or to 6 of 64");
  require(values, "values are packed to 8 or 4 bits in groups of 32, or to 5 of 64");
  return {{key_bits, key_group}, {value_bits, value_group}};
}

void write_block(const mx::array& slab, int block, const mx::array& entries) {
  require(slab.flags().row_contiguous && slab.is_available(), "a slab must be evaluated");
  require(slab.ndim() == 6 || slab.ndim() == 4, "slabs have 6 dimensions, packed ones 4");
  require(block >= 0 && block < slab.shape(0), "the slab has no such block");
  if (slab.ndim() == 4) {
    require(entries.dtype() == slab.dtype() && entries.ndim() == 3 &&
                std::equal(slab.shape().begin() + 1, slab.shape().end(), entries.shape().begin()),
            "a packed block is written whole");
    const mx::array from = settled(entries);
    std::memcpy(const_cast<char*>(slab.data<char>()) + block * from.nbytes(), from.data<char>(), from.nbytes());
    return;
  }
  require(entries.ndim() == 5 && entries.dtype() == slab.dtype() && entries.shape(0) == slab.shape(1) &&
              slab.shape(2) == 2 && entries.shape(1) == 2 && entries.shape(2) == slab.shape(3) && entries.shape(3) <= slab.shape(4) &&
              entries.shape(4) == slab.shape(5),
          "entries must be (layers, 2, Hkv, n, D) of the slab's type");
  if (entries.size() == 0) return;
  const mx::array from = settled(entries);
  const int64_t row = slab.shape(5) * static_cast<int64_t>(slab.itemsize());
  const int64_t here = row * entries.shape(3), apart = row * slab.shape(4);  // bytes of a head: of the entries, and of a whole block
  const int64_t heads = static_cast<int64_t>(slab.shape(1)) * 2 * slab.shape(3);
  char* to = const_cast<char*>(slab.data<char>()) + block * heads * apart;
  for (int64_t i = 0; i < heads; ++i) {
    std::memcpy(to + i * apart, from.data<char>() + i * here, static_cast<size_t>(here));
  }
}

mx::array cut_block(const mx::array& block, int entries, const Packings& packings, int dim) {
  require(packings.keys.bits != 0 && dim > 0 && dim % 16 == 0 && entries >= 0, "only packed blocks are cut");
  const int64_t each = head_bytes(packings, dim), values_at = PackedPart(packings.keys, dim).bytes;
  require(block.ndim() == 3 && block.dtype() == mx::uint8 && block.shape(2) == each, "a packed block is (layers, Hkv, bytes)");
  const mx::array from = settled(block);
  mx::array cut(allocated(from.nbytes()), from.shape(), mx::uint8);
  char* to = cut.data<char>();
  std::memcpy(to, from.data<char>(), from.nbytes());
  // An entry's bytes are all over the block (core/packed.h), so rows of zeros are packed over it.
  const Kernels& kernels = best_kernels();
  const std::vector<float> zeros(static_cast<size_t>(dim), 0.0f);
  for (size_t at = 0; at < from.nbytes(); at += static_cast<size_t>(each)) {
    for (int64_t entry = entries; entry < kBlock; ++entry) {
      kernels.pack_key(zeros.data(), dim, packings.keys, entry, to + at);
      kernels.pack_value(zeros.data(), dim, packings.values, entry, to + at + values_at);
    }
  }
  return cut;
}

mx::array grow_buffer(const mx::array& buffer, int capacity) {
  require(buffer.ndim() == 4 && buffer.shape(2) <= capacity, "a buffer must be (B, Hkv, entries, D), and no longer than asked for");
  mx::array from = buffer;
  from.eval();
  // A slice of entries is read in place.
  if (from.strides(3) != 1 || from.strides(2) != from.shape(3)) from = settled(from);
  mx::Shape shape = from.shape();
  shape[2] = capacity;
  mx::array out = zeros_on_lines(shape, from.dtype());
  if (from.size() == 0) return out;
  const auto item = static_cast<int64_t>(from.itemsize()), row = item * shape[3];
  char* to = out.data<char>();
  for (int64_t b = 0; b < shape[0]; ++b) {
    for (int64_t h = 0; h < shape[1]; ++h, to += row * capacity) {
      const char* head = from.data<char>() + (b * from.strides(0) + h * from.strides(1)) * item;
      std::memcpy(to, head, static_cast<size_t>(row * from.shape(2)));
    }
  }
  return out;
}

}  // namespace headrace
