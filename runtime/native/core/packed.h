// Packed K/V: integers of 4 to 8 bits, and the layout of one head's entries in a block.
//
// Heads are stored as their Hadamard transform (Kernels::hadamard), in which no channel is far larger than the others. Queries are
// transformed, too, so scores stay, and the sum of the values is transformed back.
//
// A group of numbers along the head's dimension shares a float16 scale: a code of B bits stands for scale * (code - 2^(B - 1)). A block
// has kBlock entries of keys, then of values, each
//
//   scales (groups, kBlock), codes
//
// Codes are in dwords; a lane belongs to an entry (keys) or to a number (values), so that nothing is summed across lanes. Of 5 or 6 bits
// the lowest four are in dwords of eight numbers, and the high ones in dwords of their own, kHighWords for each such bit of a group and
// four entries:
//
// - keys (8 or 6 bits): tiles of kTile entries; dword j of an entry has its numbers from j * 32 / 8, or with 6 bits from 8 j on, next to
//   those of the tile's others. Then follow four dwords of high bits for each group: bits 4 j + 2 h and the next of byte b belong to half
//   h of byte b of dword j of 16 numbers.
// - values (8, 5 or 4 bits): group by group; a dword has four entries' bytes in the order 0, 2, 1, 3 (pairs of codes are two bytes apart),
//   next to those of the group's other numbers. With 5 or 4 bits a byte has two numbers of one entry, half a group apart: entries never
//   share a byte, so threads can write concurrently. With 5 bits the fifth ones are behind all groups' dwords, likewise by entries: bit
//   2 j + h of byte b of dword i belongs to half h of byte b of dword j * kHighWords + i.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace headrace {

constexpr int64_t kTile = 16;  // entries of a key tile

constexpr int64_t kHighWords = 8;  // dwords of one high bit of a group and four entries

// Bytes of one head's keys or values in a block: starts of the codes and of values' high bits, an entry's codes, and the total.
struct PackedPart {
  int64_t codes, high, row, bytes;

  [[gnu::always_inline]] PackedPart(const Packing& packing, int64_t dim) {
    const int64_t groups = packing.groups(dim), low = packing.bits == 8 ? dim : dim / 2;
    const int64_t high_bits = packing.bits == 8 ? 0 : packing.bits - 4;
    codes = groups * kAttendChunk * 2;
    high = codes + kAttendChunk * low;
    row = low + groups * high_bits * kHighWords;
    bytes = codes + kAttendChunk * row;
  }
};

// Floats that attend_packed needs beside scores, for `queries` of size `dim`.
inline int64_t packed_scratch(int64_t queries, int64_t dim) {
  return queries * (dim / 2 + dim / 16 + kAttendChunk) + kAttendChunk;
}

}  // namespace headrace
