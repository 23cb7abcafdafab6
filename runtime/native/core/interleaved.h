// Interleaved layout of matrices for rounded activations (isa/bands.cpp).
//
// A band has kBand rows: word k of all its rows, then word k + 1: (bands, words, kBand). Scales and offsets: (bands, groups, kBand).
// Rows beyond N are zeros.
#pragma once

#include <algorithm>
#include <cstring>

#include "kernels.h"
#include "pool.h"

namespace headrace {

// Planes of 32 weights of 5 bits: four dwords of their lower four bits, like weights of 4 bits, then a dword of their highest: of weight
// 8 * j + 2 * byte + s at bit 8 * byte + 2 * j + s. So bytes of both planes meet by a shift and a mask.
constexpr int64_t kPlanedWords = 5;

inline int high_bit(int weight) { return weight % 8 / 2 * 8 + weight / 8 * 2 + weight % 2; }

// to, from: `blocks` of 32 weights of 5 bits, as planes and as MLX packs them; they may be the same.
inline void split_planes(const uint32_t* from, int64_t blocks, uint32_t* to) {
  for (int64_t b = 0; b < blocks; ++b, from += kPlanedWords, to += kPlanedWords) {
    uint32_t planes[kPlanedWords] = {};
    for (int j = 0; j < 4; ++j) {
      uint64_t eight = 0;
      std::memcpy(&eight, reinterpret_cast<const char*>(from) + 5 * j, 5);
      for (int i = 0; i < 8; ++i) {
        const auto code = static_cast<uint32_t>(eight >> 5 * i);
        planes[j] |= (code & 15) << 4 * i;
        planes[4] |= (code >> 4 & 1) << high_bit(8 * j + i);
      }
    }
    std::copy(planes, planes + kPlanedWords, to);
  }
}

inline int64_t bands(int64_t rows) { return (rows + kBand - 1) / kBand; }

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
        for (int64_t lane = 0; lane < here; ++lane) {
          for (int64_t c = begin; c < end; ++c) out[c * kBand + lane] = band[lane * columns + c];
        }
      }
    }
  });
}

}  // namespace headrace
