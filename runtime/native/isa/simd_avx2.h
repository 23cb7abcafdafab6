// Eight float lanes on AVX2 with FMA and F16C.
//
// Same names as simd_avx512.h, which explains those that need it. See simd.h.
// Guard: runtime/native/tests, which runs every set of the processor.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "../core/kernels.h"

namespace headrace::HEADRACE_ISA {

using vf = __m256;
using vi = __m256i;
constexpr int W = 8;
constexpr int kPanelVectors = 2;  // a 6 x 16 tile: 12 accumulators of 16 registers
constexpr int kTileRows = 6;
constexpr int kAccumulators = 8;  // of products in bands.cpp, beside weights, of 16 registers
constexpr int kSlabRows = 12;  // activation rows from which weights are unpacked to memory for all of them; 0: never
constexpr int kQueries = 4;  // that a key meets at once
constexpr bool kPairsFaster = true;
constexpr const char* kName = "avx2";

inline vi first(int64_t n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

inline vf zero() { return _mm256_setzero_ps(); }
inline vf set1(float x) { return _mm256_set1_ps(x); }
inline vf load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, vf v) { _mm256_storeu_ps(p, v); }
inline vf load_first(const float* p, int64_t n) { return n >= W ? load(p) : _mm256_maskload_ps(p, first(n)); }
inline void store_first(float* p, vf v, int64_t n) {
  if (n >= W) return store(p, v);  // a masked store takes tens of cycles
  _mm256_maskstore_ps(p, first(n), v);
}
inline vf add(vf a, vf b) { return _mm256_add_ps(a, b); }
inline vf sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
inline vf mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
inline vf div(vf a, vf b) { return _mm256_div_ps(a, b); }
inline vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
inline vf max(vf a, vf b) { return _mm256_max_ps(a, b); }
inline vf min(vf a, vf b) { return _mm256_min_ps(a, b); }
inline float sum(vf v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float maximum(vf v) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

inline vf where_above(vf x, float limit, vf a) {
  return _mm256_and_ps(_mm256_cmp_ps(x, set1(limit), _CMP_GT_OQ), a);
}
inline vf unless_below(vf x, float limit, vf a) {
  return _mm256_and_ps(_mm256_cmp_ps(x, set1(limit), _CMP_NLE_UQ), a);
}
inline vf round_even(vf x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vf times_power_of_two(vf x, vf whole) {
  const vi exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23);
  return mul(x, _mm256_castsi256_ps(exponent));
}

inline vf times_power(vf x, vf power) { return mul(x, power); }

// Eight scales of 8 bits, as in simd_avx512.h.
template <Type T>
inline vf scales_of(__m128i raw) {
  if constexpr (T == Type::e8m0) {
    const vi exponent = _mm256_slli_epi32(_mm256_cvtepu8_epi32(raw), 23);
    return _mm256_castsi256_ps(_mm256_max_epu32(exponent, _mm256_set1_epi32(0x400000)));
  }
  const __m128i wide = _mm_cvtepu8_epi16(raw);
  const __m128i half = _mm_or_si128(_mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x7f)), 7),
                                    _mm_slli_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x80)), 8));
  return mul(_mm256_cvtph_ps(half), set1(256.0f));
}

template <Type T>
inline vf load_as(const void* base, int64_t i) {
  if constexpr (T == Type::f32) {
    return load(static_cast<const float*>(base) + i);
  } else if constexpr (T == Type::e8m0 || T == Type::e4m3) {
    return scales_of<T>(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(static_cast<const uint8_t*>(base) + i)));
  } else {
    const auto* p = static_cast<const uint16_t*>(base) + i;
    const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    if constexpr (T == Type::f16) return _mm256_cvtph_ps(raw);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
  }
}

template <Type T>
inline vf load_first_as(const void* base, int64_t i, int64_t n) {
  if constexpr (T == Type::f32) {
    return load_first(static_cast<const float*>(base) + i, n);
  } else if constexpr (T == Type::e8m0 || T == Type::e4m3) {
    alignas(16) uint8_t raw[16] = {};
    std::memcpy(raw, static_cast<const uint8_t*>(base) + i, static_cast<size_t>(n));
    return scales_of<T>(_mm_load_si128(reinterpret_cast<const __m128i*>(raw)));
  } else {
    alignas(16) uint16_t raw[W] = {};
    std::memcpy(raw, static_cast<const uint16_t*>(base) + i, static_cast<size_t>(n) * sizeof raw[0]);
    return load_as<T>(raw, 0);
  }
}

inline void store_first_f16(uint16_t* p, vf v, int64_t n) {
  const __m128i half = _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  std::memcpy(p, &half, static_cast<size_t>(n) * sizeof *p);
}

inline vi load_words(const uint32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const vi*>(p)); }
inline vi load_first_words(const uint32_t* p, int64_t n) {
  return _mm256_maskload_epi32(reinterpret_cast<const int*>(p), first(n));
}

// Two 16-bit numbers a dword, as in simd_avx512.h.
inline void store_words(float* p, vi v) { _mm256_storeu_si256(reinterpret_cast<vi*>(p), v); }
inline vi shift_right(vi words, int bits) { return _mm256_srli_epi32(words, bits); }
template <int Bits>
inline vi pairs(vi words, int step) {
  if (step == 16 / Bits - 1) return _mm256_srli_epi16(words, 16 - Bits);
  return _mm256_and_si256(shift_right(words, step * Bits), _mm256_set1_epi32(((1 << Bits) - 1) * 0x10001));
}
inline vi set1_word(const float* p) { return _mm256_set1_epi32(__builtin_bit_cast(int, *p)); }
inline vi dot_pairs(vi acc, vi a, vi b) {
  acc = _mm256_add_epi32(acc, _mm256_madd_epi16(a, b));
  asm("" : "+x"(acc));  // GCC otherwise makes the products of several steps before it adds them, and spills them
  return acc;
}
inline vi dot_pairs_with(vi acc, vi a, const float* pair) { return dot_pairs(acc, a, set1_word(pair)); }
inline vi add_words(vi a, vi b) { return _mm256_add_epi32(a, b); }
// Four bytes a dword, as in simd_avx512.h.
template <int Bits>
inline vi quads(vi words, int step) {
  if constexpr (Bits == 8) return words;
  return _mm256_and_si256(shift_right(words, step * Bits), _mm256_set1_epi8((1 << Bits) - 1));
}
template <int Largest>
inline vi dot_quads(vi acc, vi a, vi b) {
  const vi ones = _mm256_set1_epi16(1);
  if constexpr (Largest < 128) return dot_pairs(acc, _mm256_maddubs_epi16(a, b), ones);
  // Sums of two products of 8 bits need 17.
  const vi even = _mm256_set1_epi16(0xff);
  acc = dot_pairs(acc, _mm256_maddubs_epi16(_mm256_and_si256(a, even), b), ones);
  return dot_pairs(acc, _mm256_maddubs_epi16(_mm256_andnot_si256(even, a), b), ones);
}
// The same for a sum that begins at 0 and has at most eight products, whose dwords group_sum gives. Numbers up to 15 fit two sums of
// 16 bits a dword: 2 * 15 * 128 * 8 is below 2^15.
template <int Largest>
inline vi dot_in_group(vi acc, vi a, vi b) {
  if constexpr (Largest > 15) return dot_quads<Largest>(acc, a, b);
  acc = _mm256_add_epi16(acc, _mm256_maddubs_epi16(a, b));
  asm("" : "+x"(acc));  // as in dot_pairs
  return acc;
}
template <int Largest>
inline vi group_sum(vi sum) {
  return Largest > 15 ? sum : _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
}
// Four bytes of 4 + High bits: those of quads<4>, and part `part` of the bytes of `high`, each of High bits, above them.
template <int High>
inline vi join_planes(vi low, vi high, int step, int part) {
  const int up = 4 - part * High;
  const vi moved = up < 0 ? shift_right(high, -up) : _mm256_slli_epi32(high, up);
  return _mm256_or_si256(quads<4>(low, step), _mm256_and_si256(moved, _mm256_set1_epi8(((1 << High) - 1) << 4)));
}
inline vi shift_right_by(vi words, const float* bits) { return _mm256_srlv_epi32(words, set1_word(bits)); }
inline uint32_t lanes_with(vf v, float x) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(v, set1(x), _CMP_EQ_OQ)));
}
inline void store_bytes(int8_t* p, vi whole) {
  const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
  const __m128i low = _mm_and_si128(halves, _mm_set1_epi16(0xff));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(low, low));
}
inline vf to_float(vi v) { return _mm256_cvtepi32_ps(v); }
template <int Bits>
inline vf lowest(vi words) { return to_float(_mm256_and_si256(words, _mm256_set1_epi32((1 << Bits) - 1))); }
inline void store_halves(float* p, vi whole) {
  const __m128i packed = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
}
inline vi to_whole(vf v) { return _mm256_cvtps_epi32(v); }
inline vi join_pairs(vf low, vf high) {
  return _mm256_blend_epi16(_mm256_cvtps_epi32(low), _mm256_slli_epi32(_mm256_cvtps_epi32(high), 16), 0xaa);
}

// Value `step` of each lane's dword. Other instruction sets may encode it: `decode` adapts scale and offset.
template <int Bits>
inline vf quant(vi words, int step) {
  const vi shifted = _mm256_srli_epi32(words, step * Bits);
  return _mm256_cvtepi32_ps(_mm256_and_si256(shifted, _mm256_set1_epi32((1 << Bits) - 1)));
}

template <int Bits>
inline void decode(vf&, vf&) {}

// E2M1 and E4M3, as in simd_avx512.h.
inline vf fp4(vi words, int step) {
  const vi at = _mm256_srli_epi32(words, 4 * step);
  const vf magnitude = _mm256_permutevar8x32_ps(_mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6), at);
  const vi sign = _mm256_slli_epi32(_mm256_and_si256(at, _mm256_set1_epi32(8)), 28);
  return _mm256_xor_ps(magnitude, _mm256_castsi256_ps(sign));
}
inline vi fp4_quads(vi words) {
  // Twice the value of a code, plus 12: of 0, 0.5, 1, 1.5, 2, 3, 4, 6, and of the same with a sign (Fp4 in weights.h).
  const __m128i table = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), _mm256_and_si256(words, _mm256_set1_epi8(15)));
}
inline vf fp8(vi words, int step) {
  const vi up = _mm256_slli_epi32(words, 24 - 8 * step);
  const vi bits = _mm256_and_si256(_mm256_srai_epi32(up, 4), _mm256_set1_epi32(static_cast<int>(0x87f00000u)));
  return mul(_mm256_castsi256_ps(bits), set1(0x1p120f));
}

// Two values of an odd width a dword: values 8 * step + i of a block at bit 0 of lane i, and those 8 later at bit 16. Eight or sixteen
// bytes are broadcast from memory, no later ones than the block's: the last steps begin before their values, and shuffle later bytes
// into place.
template <int Bits, int Block>
inline vi unpack(const uint8_t* block, int step) {
  constexpr int kBytes = Block * Bits / 8, kWide = 2 * Bits <= 8 ? 8 : 16;
  constexpr bool kShort = kBytes < kWide;  // 6 bits in groups of 16: bytes 0 to 7 and 4 to 11
  // Byte 4 * i + j of a plan is the byte of `raw` for byte j of lane i's dword; `raw` begins `before` bytes ahead of the step's values.
  // A value has bits in two bytes at most, and that 8 later is Bits bytes behind it. 0x80 gives 0: such a byte is beyond the block.
  // 3 bits, lane 2: bytes 0 and 1, then 3 and 4, all shifted by 6.
  alignas(32) static constexpr auto kPlans = [] {
    struct {
      uint8_t bytes[8][32];
    } plans{};
    for (int before = 0; before < 8; ++before) {
      for (int i = 0; i < 8; ++i) {
        for (int j = 0; j < 4; ++j) {
          const int byte = before + i * Bits / 8 + (j < 2 ? j : Bits + j - 2);
          plans.bytes[before][4 * i + j] = static_cast<uint8_t>(byte > 15 ? 0x80 : kShort && byte > 7 ? byte + 4 : byte);
        }
      }
    }
    return plans;
  }();
  vi raw;
  int before = 0;
  const auto eight = [&](int from) __attribute__((always_inline)) {
    int64_t word;
    std::memcpy(&word, block + from, sizeof word);
    return _mm256_set1_epi64x(word);
  };
  if constexpr (kShort) {
    raw = _mm256_blend_epi32(eight(0), eight(kBytes - 8), 0xcc);
  } else {
    constexpr int kLast = kBytes - kWide;
    const int begin = step * Bits < kLast ? step * Bits : kLast;
    before = step * Bits - begin;
    if constexpr (kWide == 8) {
      raw = eight(begin);
    } else {
      raw = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(block + begin)));
    }
  }
  const vi spread = _mm256_shuffle_epi8(raw, _mm256_load_si256(reinterpret_cast<const vi*>(kPlans.bytes[before])));
  const vi shifts = _mm256_setr_epi32(0, Bits % 8, 2 * Bits % 8, 3 * Bits % 8, 4 * Bits % 8, 5 * Bits % 8, 6 * Bits % 8,
                                      7 * Bits % 8);
  return _mm256_srlv_epi32(spread, shifts);
}
template <int Bits>
inline vf unpacked(vi two, int i) {
  return lowest<Bits>(shift_right(two, 16 * i));
}

struct Spread {
  vi index;
  explicit Spread(int lane_shift) {
    alignas(32) int32_t at[W];
    for (int i = 0; i < W; ++i) at[i] = i >> lane_shift;
    index = _mm256_load_si256(reinterpret_cast<const vi*>(at));
  }
  vf pick(const float* scales, int64_t from) const {
    return _mm256_permutevar8x32_ps(load(scales), _mm256_add_epi32(index, _mm256_set1_epi32(static_cast<int>(from))));
  }
};

// Sums of four vectors, still split between the two 128-bit halves.
inline vf half_sums4(vf a, vf b, vf c, vf d) {
  const vf ab = add(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  const vf cd = add(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
  const __m256d x = _mm256_castps_pd(ab), y = _mm256_castps_pd(cd);
  return add(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)), _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
}
inline void store_sums4(float* p, vf a, vf b, vf c, vf d) {
  const vf q = half_sums4(a, b, c, d);
  _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(q), _mm256_extractf128_ps(q, 1)));
}

inline vf sums(const vf (&v)[W]) {
  const vf lo = half_sums4(v[0], v[1], v[2], v[3]), hi = half_sums4(v[4], v[5], v[6], v[7]);
  return add(_mm256_permute2f128_ps(lo, hi, 0x20), _mm256_permute2f128_ps(lo, hi, 0x31));
}

inline void transpose(vf (&v)[W]) {
  vf t[W];
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_ps(v[2 * i], v[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(v[2 * i], v[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i) {
    const __m256d a = _mm256_castps_pd(t[4 * i]), b = _mm256_castps_pd(t[4 * i + 1]);
    const __m256d c = _mm256_castps_pd(t[4 * i + 2]), d = _mm256_castps_pd(t[4 * i + 3]);
    v[4 * i] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, c));
    v[4 * i + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, c));
    v[4 * i + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(b, d));
    v[4 * i + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(b, d));
  }
  for (int i = 0; i < 4; ++i) {
    const vf a = v[i], b = v[4 + i];
    v[i] = _mm256_permute2f128_ps(a, b, 0x20);
    v[4 + i] = _mm256_permute2f128_ps(a, b, 0x31);
  }
}

}  // namespace headrace::HEADRACE_ISA
