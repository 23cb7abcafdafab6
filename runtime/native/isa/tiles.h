// AMX's tile registers, and the same registers in memory for processors without them.
//
// Eight tiles of 16 rows of 16 dwords: tiles 0 to 3 are sums (rows of x by rows of weights), 4 and 5 rows of x, 6 and 7 weights, whose
// rows are pairs of values and whose dwords are weight rows. Tiles 2, 3 and 5 belong to the second 16 rows of x.
//
//   tiles  0, 1   (first rows of x, 16 weight rows each)    4  (first rows of x, 16 pairs)    6, 7  (16 pairs, 16 weight rows each)
//          2, 3   (second rows of x, 16 weight rows each)   5  (second rows of x, 16 pairs)
//
// Guard: tests/runtime/ops/test_tiles.py and runtime/native/tests/projections.cpp; "amx-emulated" runs on any AVX-512.
#pragma once

#include <cstdint>
#include <cstring>

namespace headrace::HEADRACE_ISA {

constexpr int kTileSide = 16;

// The processor's, in assembly: intrinsics would need options of their own for this file.
struct Amx {
  // Rows of the first and of the second part of x, 1 to 16 each.
  static void begin(int64_t first, int64_t second) {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {};
    } config;
    const auto a = static_cast<uint8_t>(first), b = static_cast<uint8_t>(second);
    const uint8_t rows[8] = {a, a, b, b, a, b, kTileSide, kTileSide};
    std::memcpy(config.rows, rows, sizeof rows);
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  // Ends the use of tiles, which the kernel would save at every switch of threads.
  static void end() { asm volatile("tilerelease"); }

  template <int T>
  static void clear() { asm volatile("tilezero %%tmm%c0" ::"i"(T)); }
  // Rows that are `stride` floats apart.
  template <int T>
  static void load(const float* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,4), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
  }
  template <int T>
  static void store(float* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,4)" ::"r"(to), "r"(stride), "i"(T) : "memory");
  }
  // C += A . B, of pairs of bfloat16 numbers.
  template <int C, int A, int B>
  static void dot() { asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B)); }
};

// In memory. The processor also takes denormal numbers for 0, which makes no difference within the bounds of tests.
struct EmulatedAmx {
  static inline thread_local uint32_t tiles[8][kTileSide][kTileSide];
  static inline thread_local int64_t rows[8];

  static void begin(int64_t first, int64_t second) {
    const int64_t of_tiles[8] = {first, first, second, second, first, second, kTileSide, kTileSide};
    std::memcpy(rows, of_tiles, sizeof rows);
    std::memset(tiles, 0, sizeof tiles);
  }
  static void end() { std::memset(rows, 0, sizeof rows); }

  template <int T>
  static void clear() { std::memset(tiles[T], 0, sizeof tiles[T]); }
  template <int T>
  static void load(const float* from, int64_t stride) {
    for (int64_t r = 0; r < rows[T]; ++r) std::memcpy(tiles[T][r], from + r * stride, sizeof tiles[T][r]);
  }
  template <int T>
  static void store(float* to, int64_t stride) {
    for (int64_t r = 0; r < rows[T]; ++r) std::memcpy(to + r * stride, tiles[T][r], sizeof tiles[T][r]);
  }
  template <int C, int A, int B>
  static void dot() {
    for (int64_t m = 0; m < rows[C]; ++m) {
      vf even = zero(), odd = zero();
      for (int k = 0; k < kTileSide; ++k) {
        const uint32_t pair = tiles[A][m][k];
        const vi weights = load_words(tiles[B][k]);
        even = fma(set1(low_of(pair)), low_of(weights), even);
        odd = fma(set1(high_of(pair)), high_of(weights), odd);
      }
      const vf so_far = _mm512_castsi512_ps(load_words(tiles[C][m]));
      const vf sums = add(so_far, add(even, odd));
      std::memcpy(tiles[C][m], &sums, sizeof sums);
    }
  }

 private:
  static float low_of(uint32_t pair) { return __builtin_bit_cast(float, pair << 16); }
  static float high_of(uint32_t pair) { return __builtin_bit_cast(float, pair & 0xffff0000); }
  static vf low_of(vi pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
  static vf high_of(vi pairs) { return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(-65536))); }
};

}  // namespace headrace::HEADRACE_ISA
