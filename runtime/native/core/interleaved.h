// Interleaved layout of matrices for rounded activations (isa/bands.cpp).
//
// A band has kBand rows: word k of all its rows, then word k + 1: (bands, words, kBand). Scales and offsets: (bands, groups, kBand).
// Rows beyond N are zeros.
//
//   number `column` of row r: index (r / kBand * columns + column) * kBand + r % kBand
//
// bind/matrix_handle.cpp writes the layout; isa/bands.cpp, isa/tiles.cpp and core/embed.cpp read it.
// Guard: runtime/native/tests/projections.cpp (test_interleaving); tests/runtime/ops/test_native_weights.py.
#pragma once

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels.h"
#include "pool.h"

namespace headrace {

// Planes of weights of 5 or 6 bits, in blocks of 32 or 16: dwords of the lower four bits of eight weights each, like weights of 4 bits,
// then a dword of the high ones, `bits` - 4 of each weight: those of weight 8 * j + 2 * byte + s in the block at bit
// 8 * byte + (bits - 4) * (2 * j + s). So bytes of both planes meet by a shift and a mask. The lowest byte of the high dword:
//
//   6 bits, blocks of 16 weights, 2 + 1 dwords    bits  0,1  2,3  4,5  6,7               of weights  0 1 8 9
//   5 bits, blocks of 32 weights, 4 + 1 dwords    bits  0  1  2  3  4  5  6  7           of weights  0 1 8 9 16 17 24 25
//
// and the next byte has those of each weight + 2.
constexpr int low_planes(int bits) { return 4 / (bits - 4); }
constexpr int planed_weights(int bits) { return 8 * low_planes(bits); }
constexpr int planed_words(int bits) { return low_planes(bits) + 1; }
constexpr int high_bit(int bits, int weight) {
  return weight % 8 / 2 * 8 + (bits - 4) * (weight / 8 * 2 + weight % 2);
}

// to, from: `words` dwords of weights, whole blocks, as planes and as MLX packs them; they may be the same.
template <int Bits>
void split_planes(const uint32_t* from, int64_t words, uint32_t* to) {
  constexpr int kLow = low_planes(Bits), kWords = planed_words(Bits);
  for (int64_t at = 0; at < words; at += kWords) {
    uint32_t planes[kWords] = {};
    for (int j = 0; j < kLow; ++j) {
      uint64_t eight = 0;
      std::memcpy(&eight, reinterpret_cast<const char*>(from + at) + Bits * j, Bits);
      for (int i = 0; i < 8; ++i) {
        const uint64_t code = eight >> Bits * i & ((1u << Bits) - 1);
        planes[j] |= static_cast<uint32_t>(code & 15) << 4 * i;
        planes[kLow] |= static_cast<uint32_t>(code >> 4) << high_bit(Bits, 8 * j + i);
      }
    }
    std::copy(planes, planes + kWords, to + at);
  }
}

inline void split_planes(int bits, const uint32_t* from, int64_t words, uint32_t* to) {
  bits == 5 ? split_planes<5>(from, words, to) : split_planes<6>(from, words, to);
}

inline int64_t bands(int64_t rows) { return (rows + kBand - 1) / kBand; }

// The numbers of a and b by turns, those of the first or of the second half of both.
template <int Half, class Vector, int... Lane>
Vector by_turns(Vector a, Vector b, std::integer_sequence<int, Lane...>) {
  constexpr int kLanes = sizeof...(Lane);
  return __builtin_shufflevector(a, b, (Half * kLanes / 2 + Lane / 2 + Lane % 2 * kLanes)...);
}

constexpr int kVectorBytes = 16;  // of a vector that every processor has
template <class T>
constexpr int64_t kSide = kVectorBytes / sizeof(T);  // rows and columns of a square, which are transposed in vectors

// to[c * kBand + r] = from[r * columns + c] for r and c below kSide.
template <class T>
void transpose_square(const T* from, int64_t columns, T* to) {
  typedef T Vector __attribute__((vector_size(kVectorBytes)));
  constexpr int kRows = kSide<T>, kHalf = kRows / 2;
  constexpr std::make_integer_sequence<int, kRows> kLanes{};
  Vector rows[kRows];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) std::memcpy(&rows[r], from + r * columns, sizeof rows[r]);
  // A round moves the highest bit of a number's row below those of its lane, and the highest of its lane below those of its row.
#pragma GCC unroll 4
  for (int round = 1; round < kRows; round *= 2) {
    Vector mixed[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kHalf; ++r) {
      mixed[2 * r] = by_turns<0>(rows[r], rows[r + kHalf], kLanes);
      mixed[2 * r + 1] = by_turns<1>(rows[r], rows[r + kHalf], kLanes);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) rows[r] = mixed[r];
  }
#pragma GCC unroll 16
  for (int c = 0; c < kRows; ++c) std::memcpy(to + c * kBand, &rows[c], sizeof rows[c]);
}

// to (bands, columns, kBand) from (rows, columns).
template <class T>
void interleave(Pool& pool, const T* from, int64_t rows, int64_t columns, T* to) {
  constexpr int64_t kAtOnce = 64 / sizeof(T);  // columns: a cache line of every row
  pool.run(bands(rows), [&](Tasks& tasks) {
    while (tasks.next()) {
      const int64_t row = tasks.index() * kBand, here = std::min(kBand, rows - row);
      const T* band = from + row * columns;
      T* out = to + row * columns;
      if (here < kBand) std::fill(out, out + kBand * columns, T{0});
      for (int64_t begin = 0; begin < columns; begin += kAtOnce) {
        const int64_t end = std::min(columns, begin + kAtOnce);
        // As many lines of the next band: the processor does not follow 32 rows by itself.
        const T* ahead = band + kBand * (columns + begin);
        for (int64_t i = 0; i < kBand * kAtOnce; i += kAtOnce) __builtin_prefetch(ahead + i);
        for (int64_t lane = 0; lane < here; lane += kSide<T>) {
          const int64_t below = std::min(here, lane + kSide<T>);
          const int64_t squares_end = lane + kSide<T> <= here ? end / kSide<T> * kSide<T> : begin;
          for (int64_t c = begin; c < squares_end; c += kSide<T>) {
            transpose_square(band + lane * columns + c, columns, out + c * kBand + lane);
          }
          for (int64_t r = lane; r < below; ++r) {
            for (int64_t c = squares_end; c < end; ++c) out[c * kBand + r] = band[r * columns + c];
          }
        }
      }
    }
  });
}

}  // namespace headrace
