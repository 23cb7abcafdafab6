// K/V as whole numbers of 8 or 4 bits: how one head's entries of a block lie in memory.
//
// A group of numbers along the head's dimension shares a scale (float16): 8 bits stand for scale * (code - 128), 4 bits, which
// share an offset too, for scale * code + offset. A block has kBlock entries of keys, then of values, each
//
//   scales (groups, kBlock), offsets likewise where there are any, codes
//
// with codes in dwords, so that a lane belongs to an entry (keys) or to a number (values) and nothing is summed across lanes:
//
// - keys: tiles of kTile entries; in a tile, dword j of an entry has its numbers from j * 32 / bits on, and those of all entries are
//   side by side.
// - values: group by group; in a group, a dword has four entries' bytes (the first, third, second, fourth: pairs of codes are bytes
//   two apart), and those of its numbers are side by side. Of 4 bits, a byte has two numbers of one entry, half the group apart: no
//   two entries share a byte, so that threads can write side by side.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace headrace {

constexpr int64_t kTile = 16;  // keys whose dwords are side by side

// One of K and V of one head in a block, whose parts are found by these.
struct PackedPart {
  int64_t scales = 0, offsets, codes, bytes;  // where they begin, and where the part ends

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
