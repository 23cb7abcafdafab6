// Quantized blocks of GGUF files, unpacked to MLX's affine groups: weight = code * scale + bias.
//
// models/gguf/tensors.py calls it for all quantized matrices but those that it rounds to 8 bits (`_requantized`).
// models/gguf/numpy_blocks.py has the same unpackers in numpy, for machines without this module.
// Guards: runtime/native/tests/blocks.cpp; tests/models/gguf/test_tensors.py compares every type with the reference.
#pragma once

#include <cstdint>
#include <string_view>

#include "kernels.h"
#include "pool.h"

namespace headrace {

// A tensor type of GGUF files, and the groups that its blocks become.
struct BlockType {
  const char* name;
  int bytes;    // of a block
  int weights;  // of a block, a multiple of 32
  int bits;     // of a code
  int group;    // weights that share a scale
  // Unpacks some blocks, on this thread. codes: see AffineGroups. scales, biases: of each group.
  void (*unpack)(const uint8_t* blocks, int64_t count, uint8_t* codes, float* scales, float* biases);
};

// The type of that name; nullptr if it has no unpacker here.
const BlockType* block_type(std::string_view name);

// Memory for groups. type: of scales and biases, f16 or f32; both may be nullptr, and then codes alone are written.
struct AffineGroups {
  uint8_t* codes;  // a little-endian bit stream, first code in the lowest bits
  Type type;
  void* scales;
  void* biases;
};

struct Unpacked {
  bool finite;  // all scales and biases are
  bool exact;   // AffineGroups::type has all of them
};

Unpacked unpack_blocks(Pool& pool, const BlockType& type, const uint8_t* blocks, int64_t count, const AffineGroups& to);

}  // namespace headrace
