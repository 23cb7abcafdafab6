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
// Codes are in dwords (32 bits, little-endian). A lane of a vector belongs to an entry (keys) or to a number (values), so that nothing is
// summed across lanes. Below, cells stand from bit 0 on the left to bit 31 on the right, and numbers are counted from 0: those of the head
// or of a group, as it says.
//
// Keys are in tiles of kTile entries. Dword j of a tile's 16 entries is 16 dwords side by side: dword j of entry e begins at byte
// (j * kTile + e % kTile) * 4 of the tile. A tile has `row` * kTile bytes.
//
//   8 bits, groups of 32: dword j, numbers 4 j to 4 j + 3 of the head
//     bits    0..7     8..15    16..23   24..31
//     number  4 j      4 j + 1  4 j + 2  4 j + 3
//   6 bits, groups of 64: dword j < D / 8 has the lowest four bits of numbers 8 j to 8 j + 7 of the head
//     bits    0..3  4..7  8..11  12..15  16..19  20..23  24..27  28..31
//     number  8 j   + 1   + 2    + 3     + 4     + 5     + 6     + 7
//   and after them four dwords for each group; dword D / 8 + 4 g + i has the highest two bits of numbers 16 i to 16 i + 15 of group g
//     bits    0  2  4  6    8  10 12 14   16 18 20 22   24 26 28 30      (two bits from each of these on)
//     number  0  1  8  9    2  3  10 11   4  5  12 13   6  7  14 15      (+ 16 i)
//
// Values are in groups one after the other, in a group by four entries, and of those dwords 0, 1, ... side by side. A byte is of one entry
// alone, so threads can write entries concurrently. Entries are in the order 0, 2, 1, 3: pairs of codes are two bytes apart.
//
//     bits            0..7       8..15      16..23     24..31
//     entry % 4       0          2          1          3
//   8 bits, groups of 32: dword n has number n of the group
//   4 bits, groups of 32: dword n has number n in the lower half of each byte, and number n + size / 2 in the upper half
//   5 bits, groups of 64: the lowest four bits as with 4 bits. After the dwords of all groups (`high`), group by group and by four
//   entries, follow kHighWords dwords of fifth bits. In dword i each byte has, with h = size / 2:
//     bit     0  1      2      3          4       5           6       7
//     number  i  i + h  i + 8  i + 8 + h  i + 16  i + 16 + h  i + 24  i + 24 + h      (of a pair the first is below h, or bits are 0)
//
// Example: keys of 6 bits, D = 64, entry 18, number 13 with code 45 = 0b101101 and scale 0.5: it stands for 0.5 * (45 - 32) = 6.5.
// Scales take 1 group * 128 entries * 2 = 256 bytes. A row has 32 + 16 = 48 bytes, so tile 1 begins at byte 256 + 48 * 16 = 1024.
// There the entry's column is 2. Lowest bits 0b1101: dword 13 / 8 = 1, byte 1024 + (1 * 16 + 2) * 4 = 1096, bits 20 to 23. Highest
// bits 0b10: dword 64 / 8 = 8, byte 1024 + (8 * 16 + 2) * 4 = 1544, bits 22 and 23.
//
// The last group of a head may have fewer numbers; its high bits take the room of a whole group. isa/packed.cpp writes and reads this
// layout, bind/cache_blocks.cpp allows the widths and groups (`packings_of`) and refuses slabs of another size. Blocks are kept on disk
// as they are: another layout needs another version there (runtime/kv/disk.py). Its twin in Python has sizes alone:
// runtime/ops/kv_format.py, where `Coding.row_bytes` is PackedPart::bytes / kBlock. (runtime/ops/packed.py attends over MLX's layout.)
//
// Guard: runtime/native/tests/packed.cpp packs and unpacks every width and size, and attends; tests/runtime/ops/test_kv_format.py has
// the sizes, and tests/runtime/ops/test_packed_attention.py the errors against float32 K/V.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace headrace {

constexpr int64_t kTile = 16;  // entries of a key tile

constexpr int64_t kHighWords = 8;  // dwords of one high bit of a group and four entries: 64 numbers * 4 entries / 32 bits

// One head's keys or values in a block, in bytes from their beginning: `codes`, the codes' first; `high`, the first of values' fifth bits;
// `row`, one entry's codes; `bytes`, all of it.
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

// Floats that attend_packed needs after the scores, for `queries` of size `dim`. For each query:
//
//   dim / 2           the rounded query, two numbers of 16 bits in a float
//   dim / 16          a bias per group of keys; groups have 32 or 64 numbers, so there are at most so many
//   kAttendChunk / 2  the rounded weights of a group of values, two of 16 bits in a float
//
// For all queries, kAttendChunk: weights times scales of one query, before they are rounded.
inline int64_t packed_scratch(int64_t queries, int64_t dim) {
  return queries * (dim / 2 + dim / 16 + kAttendChunk / 2) + kAttendChunk;
}

}  // namespace headrace
