// Packed K/V: integers of 8 or 4 bits, and the layout of one head's entries in a block.
//
// Heads are stored as their Hadamard transform (Kernels::hadamard), in which no channel is far larger than the others. Queries are
// transformed, too, so scores stay, and the sum of the values is transformed back.
//
// A group of numbers along the head's dimension shares a float16 scale: 8 bits stand for scale * (code - 128); 4 bits also share an
// offset and stand for scale * code + offset. A block has kBlock entries of keys, then of values, each
//
//   scales (groups, kBlock), offsets likewise if any, codes
//
// Codes are in dwords; a lane belongs to an entry (keys) or to a number (values), so that nothing is summed across lanes:
//
// - keys: tiles of kTile entries; dword j of an entry has its numbers from j * 32 / bits on, next to those of the tile's others.
// - values: group by group; a dword has four entries' bytes in the order 0, 2, 1, 3 (pairs of codes are two bytes apart), next to
//   those of the group's other numbers. With 4 bits a byte has two numbers of one entry, half a group apart: entries never share a
//   byte, so threads can write concurrently.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace headrace {

constexpr int64_t kTile = 16;  // entries of a key tile

// Byte offsets of the parts of one head's keys or values in a block.
struct PackedPart {
  int64_t scales = 0, offsets, codes, bytes;  // starts, and the total

  [[gnu::always_inline]] PackedPart(const Packing& packing, int64_t dim) {
    const int64_t each = packing.groups(dim) * kAttendChunk * 2;
    offsets = each;
    codes = packing.offset() ? 2 * each : each;
    bytes = codes + kAttendChunk * dim * packing.bits / 8;
  }
};

// Floats that attend_packed needs beside scores, for `queries` of size `dim`.
inline int64_t packed_scratch(int64_t queries, int64_t dim) {
  return queries * (dim / 2 + 2 * (dim / 16) + kAttendChunk) + kAttendChunk;
}

}  // namespace headrace
