// Sixteen float lanes on AVX-512 (F, BW, DQ, VL and VNNI: servers since Cascade Lake, Zen 4 and 5).
//
// The three simd_*.h files define the same names; kernels are written once against them. simd.h names the guard.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "../core/kernels.h"

namespace headrace::HEADRACE_ISA {

using vf = __m512;
using vi = __m512i;
constexpr int W = 16;
constexpr int kPanelVectors = 4;  // a 6 x 64 tile: 24 accumulators of 32 registers
constexpr int kTileRows = 6;
constexpr int kAccumulators = 16;  // of products in bands.cpp, beside weights, of 32 registers
constexpr int kSlabRows = 0;  // activation rows from which weights are unpacked to memory for all of them; 0: never
constexpr int kQueries = 6;  // that a key meets at once: 24 sums with four keys, of 32 registers
constexpr bool kPairsFaster = true;  // dot_pairs multiplies more numbers in a given time than fma
constexpr const char* kName = "avx512";

inline __mmask16 first(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }  // n <= 16

inline vf zero() { return _mm512_setzero_ps(); }
inline vf set1(float x) { return _mm512_set1_ps(x); }
inline vf load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, vf v) { _mm512_storeu_ps(p, v); }
inline vf load_first(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(first(n), p); }
inline void store_first(float* p, vf v, int64_t n) { _mm512_mask_storeu_ps(p, first(n), v); }
inline vf add(vf a, vf b) { return _mm512_add_ps(a, b); }
inline vf sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
inline vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
inline vf div(vf a, vf b) { return _mm512_div_ps(a, b); }
inline vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
inline vf max(vf a, vf b) { return _mm512_max_ps(a, b); }
inline vf min(vf a, vf b) { return _mm512_min_ps(a, b); }
inline float sum(vf v) { return _mm512_reduce_add_ps(v); }
inline float maximum(vf v) { return _mm512_reduce_max_ps(v); }

// a where x > limit, else 0.
inline vf where_above(vf x, float limit, vf a) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, set1(limit), _CMP_GT_OQ), a);
}
// a unless x <= limit, else 0: a where x is NaN, too.
inline vf unless_below(vf x, float limit, vf a) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, set1(limit), _CMP_NLE_UQ), a);
}
inline vf round_even(vf x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vf times_power_of_two(vf x, vf whole) { return _mm512_scalef_ps(x, whole); }

// x times a power of two: beside products and sums this takes no time.
inline vf times_power(vf x, vf power) { return _mm512_scalef_ps(x, _mm512_getexp_ps(power)); }
// 2^x as in simd.h, to 7e-7 of it: 2^r for |r| <= 1 / 32 is about kSquare * ((r + 1.4428)^2 + 2.0811), times a power of 2^(1 / 16).
inline vf exp2_roughly(vf x) {
  const vf bounded = max(set1(-126.0f), x), sixteenths = add(bounded, set1(786432.0f));  // 1.5 * 2^19: no finer fraction is left
  const vf whole = sub(sixteenths, set1(786432.0f));
  const vf u = add(sub(bounded, whole), set1(1.44282196f));
  // kSquare = 0.240219, times 2^(i / 16)
  const vf table = _mm512_setr_ps(0.240219459f, 0.25085488f, 0.261961192f, 0.273559183f, 0.285670698f, 0.298318416f, 0.31152609f,
                                  0.325318545f, 0.33972162f, 0.354762375f, 0.370469064f, 0.386871129f, 0.403999358f, 0.421885937f,
                                  0.440564424f, 0.460069895f);
  const vf scale = _mm512_permutexvar_ps(_mm512_castps_si512(sixteenths), table);
  return _mm512_scalef_ps(mul(fma(u, u, set1(2.08112485f)), scale), whole);
}

// Sixteen scales of 8 bits. E8M0 is the exponent of a float, but for 0, which means 2^-127; E4M3 is a float16 in short.
template <Type T>
inline vf scales_of(__m128i raw) {
  if constexpr (T == Type::e8m0) {
    const vi exponent = _mm512_slli_epi32(_mm512_cvtepu8_epi32(raw), 23);
    return _mm512_castsi512_ps(_mm512_max_epu32(exponent, _mm512_set1_epi32(0x400000)));
  }
  const __m256i wide = _mm256_cvtepu8_epi16(raw);
  const __m256i half = _mm256_or_si256(_mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x7f)), 7),
                                       _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x80)), 8));
  return mul(_mm512_cvtph_ps(half), set1(256.0f));
}

template <Type T>
inline vf load_as(const void* base, int64_t i) {
  if constexpr (T == Type::f32) {
    return load(static_cast<const float*>(base) + i);
  } else if constexpr (T == Type::e8m0 || T == Type::e4m3) {
    return scales_of<T>(_mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const uint8_t*>(base) + i)));
  } else {
    const auto* p = static_cast<const uint16_t*>(base) + i;
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    if constexpr (T == Type::f16) return _mm512_cvtph_ps(raw);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
  }
}

template <Type T>
inline vf load_first_as(const void* base, int64_t i, int64_t n) {
  if constexpr (T == Type::f32) {
    return load_first(static_cast<const float*>(base) + i, n);
  } else if constexpr (T == Type::e8m0 || T == Type::e4m3) {
    return scales_of<T>(_mm_maskz_loadu_epi8(first(n), static_cast<const uint8_t*>(base) + i));
  } else {
    const __m256i raw = _mm256_maskz_loadu_epi16(first(n), static_cast<const uint16_t*>(base) + i);
    if constexpr (T == Type::f16) return _mm512_cvtph_ps(raw);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
  }
}

inline void store_first_f16(uint16_t* p, vf v, int64_t n) {
  const __m256i half = _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm256_mask_storeu_epi16(p, first(n), half);
}

// Sixteen dwords of packed weights.
inline vi load_words(const uint32_t* p) { return _mm512_loadu_si512(p); }
inline vi load_first_words(const uint32_t* p, int64_t n) { return _mm512_maskz_loadu_epi32(first(n), p); }

// Two 16-bit numbers a dword (see rounded.h): values `step` and `step + 16 / Bits` of packed weights, the last of which a shift of
// 16-bit lanes leaves alone; sums of products; the numbers of two vectors of whole floats.
inline void store_words(float* p, vi v) { _mm512_storeu_si512(p, v); }
inline vi shift_right(vi words, int bits) { return _mm512_srli_epi32(words, static_cast<unsigned>(bits)); }
template <int Bits>
inline vi pairs(vi words, int step) {
  if (step == 16 / Bits - 1) return _mm512_srli_epi16(words, 16 - Bits);
  return _mm512_and_si512(shift_right(words, step * Bits), _mm512_set1_epi32(((1 << Bits) - 1) * 0x10001));
}
inline vi set1_word(const float* p) { return _mm512_set1_epi32(__builtin_bit_cast(int, *p)); }
// In assembly, for compilers that copy the sum around the intrinsic.
inline vi dot_pairs(vi acc, vi a, vi b) {
  asm("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
  return acc;
}
// The same with one pair for all lanes.
inline vi dot_pairs_with(vi acc, vi a, const float* pair) {
  asm("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(a), "m"(*pair));
  return acc;
}
inline vi add_words(vi a, vi b) { return _mm512_add_epi32(a, b); }
// Four bytes a dword: value `step` of every byte of packed weights, without a sign; sums of products with signed ones.
template <int Bits>
inline vi quads(vi words, int step) {
  if constexpr (Bits == 8) return words;
  return _mm512_and_si512(shift_right(words, step * Bits), _mm512_set1_epi8((1 << Bits) - 1));
}
template <int Largest>
inline vi dot_quads(vi acc, vi a, vi b) {
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
  return acc;
}
template <int Largest>
inline vi dot_in_group(vi acc, vi a, vi b) {
  return dot_quads<Largest>(acc, a, b);
}
template <int Largest>
inline vi group_sum(vi sum) {
  return sum;
}
// Four bytes of 4 + High bits: those of quads<4>, and part `part` of the bytes of `high`, each of High bits, above them.
template <int High>
inline vi join_planes(vi low, vi high, int step, int part) {
  const int up = 4 - part * High;
  const vi moved = up < 0 ? shift_right(high, -up) : _mm512_slli_epi32(high, up);
  return _mm512_or_si512(quads<4>(low, step), _mm512_and_si512(moved, _mm512_set1_epi8(((1 << High) - 1) << 4)));
}
inline vi shift_right_by(vi words, const float* bits) { return _mm512_srlv_epi32(words, set1_word(bits)); }
// A bit for each lane that is x.
inline uint32_t lanes_with(vf v, float x) { return _mm512_cmp_ps_mask(v, set1(x), _CMP_EQ_OQ); }
inline void store_bytes(int8_t* p, vi whole) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(whole)); }
inline vf to_float(vi v) { return _mm512_cvtepi32_ps(v); }
// The lowest number of every dword of packed weights.
template <int Bits>
inline vf lowest(vi words) {
  if constexpr (Bits == 4) {
    return _mm512_permutexvar_ps(words, _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  }
  return to_float(_mm512_and_si512(words, _mm512_set1_epi32((1 << Bits) - 1)));
}
// The nearest whole numbers; those of 16 bits, one behind the other.
inline void store_halves(float* p, vi whole) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(whole));
}
inline vi to_whole(vf v) { return _mm512_cvtps_epi32(v); }
inline vi join_pairs(vf low, vf high) {
  const vi raised = _mm512_slli_epi32(_mm512_cvtps_epi32(high), 16);
  return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_cvtps_epi32(low), raised);
}

// Value q at `step` of each lane's dword, encoded as the float 1 + q / 2^Bits: its bits moved to the top of a
// significand, under the exponent of 1. Two cheap instructions; `decode` pays the difference once per group.
template <int Bits>
inline vf quant(vi words, int step) {
  using Unsigned = uint32_t __attribute__((vector_size(64)));
  const int up = 23 - Bits - step * Bits;
  const auto raw = (Unsigned)words;
  const vi moved = (vi)(up >= 0 ? raw << static_cast<uint32_t>(up) : raw >> static_cast<uint32_t>(-up));
  const vi field = _mm512_set1_epi32(((1 << Bits) - 1) << (23 - Bits));
  constexpr int kAndOr = 0xea;  // (moved & field) | one
  return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(moved, field, _mm512_set1_epi32(0x3f800000), kAndOr));
}

// scale * q + offset = scale' * quant + offset'.
template <int Bits>
inline void decode(vf& scale, vf& offset) {
  scale = mul(scale, set1(static_cast<float>(1 << Bits)));
  offset = sub(offset, scale);
}

// E2M1: value `step` of each lane's dword; and the pair that is lowest in it, as whole numbers (see Fp4).
inline vf fp4(vi words, int step) {
  const vf table = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
  return _mm512_permutexvar_ps(_mm512_srli_epi32(words, static_cast<unsigned>(4 * step)), table);
}
inline vi fp4_quads(vi words) {
  const __m128i table = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), _mm512_and_si512(words, _mm512_set1_epi8(15)));
}

// E4M3: byte `step` of each lane's dword, its bits where a float has them, which is off by a power of two.
inline vf fp8(vi words, int step) {
  const vi up = _mm512_slli_epi32(words, static_cast<unsigned>(24 - 8 * step));  // the byte on top
  const vi bits = _mm512_and_si512(_mm512_srai_epi32(up, 4), _mm512_set1_epi32(static_cast<int>(0x87f00000u)));
  return mul(_mm512_castsi512_ps(bits), set1(0x1p120f));
}

// Two values of an odd width a dword: values 16 * step + i of a block at bit 0 of lane i, and those 16 later at bit 16. The block's
// dwords, and none after them, are loaded and moved to each 128-bit lane that needs them: two with its first values, two with those
// 16 later.
template <int Bits, int Block>
inline vi unpack(const uint8_t* block, int) {
  alignas(64) static constexpr auto kPlan = [] {
    struct {
      uint32_t dwords[16];
      uint8_t bytes[64];
      uint32_t shifts[16];
    } plan{};
    for (int i = 0; i < 16; ++i) {
      const int first = i / 4 * 4 * Bits / 8 + i % 4 / 2 * 2 * Bits;  // of the lane's values, or those 16 later
      plan.dwords[i] = static_cast<uint32_t>(first / 4 + i % 2);
      plan.shifts[i] = static_cast<uint32_t>(i * Bits % 8);
      for (int j = 0; j < 4; ++j) {
        const int later = j / 2 * 2 * Bits, byte = i * Bits / 8 + later + j % 2;
        const int at = byte - (i / 4 * 4 * Bits / 8 + later) / 4 * 4;
        plan.bytes[4 * i + j] = static_cast<uint8_t>(at < 8 ? at + j / 2 * 8 : 0x80);
      }
    }
    return plan;
  }();
  const auto dwords = static_cast<__mmask8>((1u << Block * Bits / 32) - 1);
  const vi raw = _mm512_castsi256_si512(_mm256_maskz_loadu_epi32(dwords, block));
  const vi moved = _mm512_permutexvar_epi32(_mm512_load_si512(kPlan.dwords), raw);
  const vi spread = _mm512_shuffle_epi8(moved, _mm512_load_si512(kPlan.bytes));
  return _mm512_srlv_epi32(spread, _mm512_load_si512(kPlan.shifts));
}
template <int Bits>
inline vf unpacked(vi two, int i) {
  return to_float(_mm512_and_si512(shift_right(two, 16 * i), _mm512_set1_epi32((1 << Bits) - 1)));
}

// Which of W scales belongs to each lane of a block of packed words, 1 << lane_shift lanes to a scale.
struct Spread {
  vi index;
  explicit Spread(int lane_shift) {
    alignas(64) int32_t at[W];
    for (int i = 0; i < W; ++i) at[i] = i >> lane_shift;
    index = _mm512_load_si512(at);
  }
  vf pick(const float* scales, int64_t from) const {
    return _mm512_permutexvar_ps(_mm512_add_epi32(index, _mm512_set1_epi32(static_cast<int>(from))), load(scales));
  }
};

// The sums of four vectors.
inline __m128 sums4(vf a, vf b, vf c, vf d) {
  const vf ab = add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const vf cd = add(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512d x = _mm512_castps_pd(ab), y = _mm512_castps_pd(cd);
  const vf q = add(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(q), _mm512_extractf32x8_ps(q, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
inline void store_sums4(float* p, vf a, vf b, vf c, vf d) { _mm_storeu_ps(p, sums4(a, b, c, d)); }

// Lane i of the result is the sum of v[i].
inline vf sums(const vf (&v)[W]) {
  vf q[4];
  for (int i = 0; i < 4; ++i) {
    const vf ab = add(_mm512_unpacklo_ps(v[4 * i], v[4 * i + 1]), _mm512_unpackhi_ps(v[4 * i], v[4 * i + 1]));
    const vf cd =
        add(_mm512_unpacklo_ps(v[4 * i + 2], v[4 * i + 3]), _mm512_unpackhi_ps(v[4 * i + 2], v[4 * i + 3]));
    const __m512d x = _mm512_castps_pd(ab), y = _mm512_castps_pd(cd);
    q[i] = add(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  }
  const vf e0 = add(_mm512_shuffle_f32x4(q[0], q[1], 0x88), _mm512_shuffle_f32x4(q[0], q[1], 0xdd));
  const vf e1 = add(_mm512_shuffle_f32x4(q[2], q[3], 0x88), _mm512_shuffle_f32x4(q[2], q[3], 0xdd));
  return add(_mm512_shuffle_f32x4(e0, e1, 0x88), _mm512_shuffle_f32x4(e0, e1, 0xdd));
}

inline void transpose(vf (&v)[W]) {
  vf t[W];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    const __m512d a = _mm512_castps_pd(t[4 * i]), b = _mm512_castps_pd(t[4 * i + 1]);
    const __m512d c = _mm512_castps_pd(t[4 * i + 2]), d = _mm512_castps_pd(t[4 * i + 3]);
    v[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
    v[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
    v[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
    v[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_f32x4(v[i], v[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_f32x4(v[i], v[4 + i], 0xdd);
    t[8 + i] = _mm512_shuffle_f32x4(v[8 + i], v[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_f32x4(v[8 + i], v[12 + i], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm512_shuffle_f32x4(t[i], t[8 + i], 0x88);
    v[4 + i] = _mm512_shuffle_f32x4(t[4 + i], t[12 + i], 0x88);
    v[8 + i] = _mm512_shuffle_f32x4(t[i], t[8 + i], 0xdd);
    v[12 + i] = _mm512_shuffle_f32x4(t[4 + i], t[12 + i], 0xdd);
  }
}

}  // namespace headrace::HEADRACE_ISA
