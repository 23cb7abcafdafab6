// Packed K/V: integers of 8 or 5 bits, and the layout of one head's entries in a block.
//
// Heads are stored as their Hadamard transform (Kernels::hadamard), in which no channel is far larger than the others. Queries are
// transformed, too, so scores stay, and the sum of the values is transformed back.
//
// A group of numbers along the head's dimension shares a float16 scale: a code of B bits stands for scale * (code - 2^(B - 1)). A block
// has kBlock entries of keys, then of values, each
//
//   scales (groups, kBlock), codes
//
// Codes are in dwords; a lane belongs to an entry (keys) or to a number (values), so that nothing is summed across lanes. Of 5 bits the
// lowest four are in dwords of eight numbers, and the fifth ones in dwords of their own, kFifthWords to a group of four entries' values:
//
// - keys: tiles of kTile entries; dword j of an entry has its numbers from j * 32 / 8, or with 5 bits from 8 j on, next to those of the
//   tile's others. Then follow two dwords of fifth bits for each group: bit 2 j + h of byte b belongs to half h of byte b of dword j of
//   32 numbers.
// - values: group by group; a dword has four entries' bytes in the order 0, 2, 1, 3 (pairs of codes are two bytes apart), next to
//   those of the group's other numbers. With 5 bits a byte has two numbers of one entry, half a group apart: entries never share a
//   byte, so threads can write concurrently. Behind all groups' dwords are the fifth bits, likewise by entries: bit 2 j + h of byte b of
//   dword i belongs to half h of byte b of dword j * kFifthWords + i.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace headrace {

constexpr int64_t kTile = 16;  // entries of a key tile

constexpr int64_t kFifthWords = 8;  // dwords of fifth bits of a group and four entries

// Bytes of one head's keys or values in a block: starts of the codes and of values' fifth bits, an entry's codes, and the total.
struct PackedPart {
  int64_t codes, fifth, row, bytes;

  [[gnu::always_inline]] PackedPart(const Packing& packing, int64_t dim) {
    const int64_t groups = packing.groups(dim), low = packing.bits == 8 ? dim : dim / 2;
    codes = groups * kAttendChunk * 2;
    fifth = codes + kAttendChunk * low;
    row = packing.bits == 8 ? low : low + groups * kFifthWords;
    bytes = codes + kAttendChunk * row;
  }
};

// Floats that attend_packed needs beside scores, for `queries` of size `dim`.
inline int64_t packed_scratch(int64_t queries, int64_t dim) {
  return queries * (dim / 2 + dim / 16 + kAttendChunk) + kAttendChunk;
}

}  // namespace headrace
