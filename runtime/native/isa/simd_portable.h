// Four float lanes through the compiler's vector extensions: NEON on aarch64, SSE2 on any x86-64.
// Same names as simd_avx512.h, which describes them; simd.h names the guard.
#pragma once

#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__x86_64__)
#include <emmintrin.h>
#endif

#include <cmath>
#include <cstring>

#include "../core/half.h"
#include "../core/kernels.h"

namespace headrace::HEADRACE_ISA {

typedef float vf __attribute__((vector_size(16)));
typedef uint32_t vi __attribute__((vector_size(16)));
typedef int32_t vs __attribute__((vector_size(16)));
constexpr int W = 4;
#if defined(__aarch64__)
constexpr int kPanelVectors = 4;  // a 6 x 16 tile: 24 accumulators of 32 registers
constexpr bool kPairsFaster = false;  // four instructions, where two fma do the same
constexpr const char* kName = "neon";
#else
constexpr int kPanelVectors = 4;
constexpr bool kPairsFaster = true;
constexpr const char* kName = "portable";
#endif
constexpr int kTileRows = 6;
constexpr int kQueries = 4;  // that a key meets at once
constexpr int kAccumulators = 16;
constexpr int kSlabRows = 0;  // activation rows from which weights are unpacked to memory for all of them; 0: never

inline vf zero() { return vf{}; }
inline vf set1(float x) { return vf{x, x, x, x}; }
inline vf load(const float* p) {
  vf v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, vf v) { __builtin_memcpy(p, &v, sizeof v); }
inline vf load_first(const float* p, int64_t n) {
  vf v{};
  for (int64_t i = 0; i < n; ++i) v[i] = p[i];
  return v;
}
inline void store_first(float* p, vf v, int64_t n) {
  for (int64_t i = 0; i < n; ++i) p[i] = v[i];
}
inline vf add(vf a, vf b) { return a + b; }
inline vf sub(vf a, vf b) { return a - b; }
inline vf mul(vf a, vf b) { return a * b; }
inline vf div(vf a, vf b) { return a / b; }
#if defined(__aarch64__)
inline vf fma(vf a, vf b, vf c) { return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
#else
inline vf fma(vf a, vf b, vf c) { return a * b + c; }
#endif
inline vf max(vf a, vf b) { return a > b ? a : b; }
inline vf min(vf a, vf b) { return a < b ? a : b; }
inline float sum(vf v) { return (v[0] + v[2]) + (v[1] + v[3]); }
inline float maximum(vf v) {
  const float a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
  return a > b ? a : b;
}

inline vf where_above(vf x, float limit, vf a) { return x > set1(limit) ? a : vf{}; }
inline vf unless_below(vf x, float limit, vf a) { return x <= set1(limit) ? vf{} : a; }
// Adding 1.5 * 2^23 leaves no fraction bits; exact for |x| < 2^22. Kept from being simplified: no -ffast-math here.
inline vf round_even(vf x) {
  const vf big = set1(12582912.0f);
  return (x + big) - big;
}
inline vf times_power_of_two(vf x, vf whole) {
  const vs exponent = (__builtin_convertvector(whole, vs) + 127) << 23;
  return x * (vf)exponent;
}

inline vf times_power(vf x, vf power) { return mul(x, power); }

template <Type T>
inline vf load_first_as(const void* base, int64_t i, int64_t n) {
  vf v{};
  for (int64_t j = 0; j < n; ++j) v[j] = load_scalar<T>(base, i + j);
  return v;
}
template <Type T>
inline vf load_as(const void* base, int64_t i) {
  if constexpr (T == Type::f32) return load(static_cast<const float*>(base) + i);
  return load_first_as<T>(base, i, W);
}

inline void store_first_f16(uint16_t* p, vf v, int64_t n) {
  for (int64_t i = 0; i < n; ++i) p[i] = f32_to_f16(v[i]);
}

inline vi load_words(const uint32_t* p) {
  vi v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
inline vi load_first_words(const uint32_t* p, int64_t n) {
  vi v{};
  for (int64_t i = 0; i < n; ++i) v[i] = p[i];
  return v;
}

// Two 16-bit numbers a dword, as in simd_avx512.h.
inline void store_words(float* p, vi v) { __builtin_memcpy(p, &v, sizeof v); }
inline vi shift_right(vi words, int bits) { return words >> static_cast<uint32_t>(bits); }
template <int Bits>
inline vi pairs(vi words, int step) {
  return shift_right(words, step * Bits) & (((1u << Bits) - 1) * 0x10001u);
}
inline vi set1_word(const float* p) {
  const uint32_t word = __builtin_bit_cast(uint32_t, *p);
  return vi{word, word, word, word};
}
#if defined(__aarch64__)
inline vi dot_pairs(vi acc, vi a, vi b) {
  const int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
  const int32x4_t low = vmull_s16(vget_low_s16(x), vget_low_s16(y));
  return (vi)vaddq_s32((int32x4_t)acc, vpaddq_s32(low, vmull_high_s16(x, y)));
}
#elif defined(__x86_64__)
inline vi dot_pairs(vi acc, vi a, vi b) {
  acc += (vi)_mm_madd_epi16((__m128i)a, (__m128i)b);
  asm("" : "+x"(acc));  // as in simd_avx2.h
  return acc;
}
#else
inline vi dot_pairs(vi acc, vi a, vi b) {
  const vs low = ((vs)(a << 16) >> 16) * ((vs)(b << 16) >> 16), high = ((vs)a >> 16) * ((vs)b >> 16);
  return (vi)((vs)acc + low + high);
}
#endif
inline vi dot_pairs_with(vi acc, vi a, const float* pair) { return dot_pairs(acc, a, set1_word(pair)); }
inline vi add_words(vi a, vi b) { return a + b; }
// Four bytes a dword, as in simd_avx512.h.
template <int Bits>
inline vi quads(vi words, int step) {
  if constexpr (Bits == 8) return words;
  return shift_right(words, step * Bits) & (((1u << Bits) - 1) * 0x01010101u);
}
typedef int16_t vh __attribute__((vector_size(16)));
template <int Largest>
inline vi dot_quads(vi acc, vi a, vi b) {
#if defined(__ARM_FEATURE_DOTPROD)
  if constexpr (Largest < 128) return (vi)vdotq_s32((int32x4_t)acc, (int8x16_t)a, (int8x16_t)b);
#endif
  acc = dot_pairs(acc, a & 0x00ff00ffu, (vi)((vh)((vh)b << 8) >> 8));
  return dot_pairs(acc, (a >> 8) & 0x00ff00ffu, (vi)((vh)b >> 8));
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
  const vi moved = up < 0 ? shift_right(high, -up) : high << up;
  return quads<4>(low, step) | (moved & (((1u << High) - 1) * 0x10101010u));
}
inline vi shift_right_by(vi words, const float* bits) { return words >> __builtin_bit_cast(uint32_t, *bits); }
inline uint32_t lanes_with(vf v, float x) {
  uint32_t lanes = 0;
  for (int i = 0; i < W; ++i) lanes |= static_cast<uint32_t>(v[i] == x) << i;
  return lanes;
}
inline void store_bytes(int8_t* p, vi whole) {
  for (int i = 0; i < W; ++i) p[i] = static_cast<int8_t>(whole[i]);
}
inline vf to_float(vi v) { return __builtin_convertvector((vs)v, vf); }
template <int Bits>
inline vf lowest(vi words) { return to_float(words & ((1u << Bits) - 1)); }
inline vi to_whole(vf v) { return (vi)__builtin_convertvector(round_even(v), vs); }
inline void store_halves(float* p, vi whole) {
  uint16_t halves[W];
  for (int i = 0; i < W; ++i) halves[i] = static_cast<uint16_t>(whole[i]);
  __builtin_memcpy(p, halves, sizeof halves);
}
inline vi join_pairs(vf low, vf high) {
  return ((vi)__builtin_convertvector(round_even(low), vs) & 0xffffu) |
         ((vi)__builtin_convertvector(round_even(high), vs) << 16);
}

// Value `step` of each lane's dword. Other instruction sets may encode it: `decode` adapts scale and offset.
template <int Bits>
inline vf quant(vi words, int step) {
  const vi value = (words >> static_cast<uint32_t>(step * Bits)) & ((1u << Bits) - 1);
  return __builtin_convertvector((vs)value, vf);
}

template <int Bits>
inline void decode(vf&, vf&) {}

// E2M1 and E4M3, as in simd_avx512.h.
inline vf fp4(vi words, int step) {
  static constexpr float kTable[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
  const vi at = (words >> static_cast<uint32_t>(4 * step)) & 15u;
  return vf{kTable[at[0]], kTable[at[1]], kTable[at[2]], kTable[at[3]]};
}
#if defined(__aarch64__)
inline vi fp4_quads(vi words) {
  static constexpr uint8_t kTable[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
  return (vi)vqtbl1q_u8(vld1q_u8(kTable), (uint8x16_t)(words & 0x0f0f0f0fu));
}
#else
inline vi fp4_quads(vi words) {
  typedef int8_t Bytes __attribute__((vector_size(16)));
  const Bytes code = (Bytes)(words & 0x0f0f0f0fu), size = code & 7;
  const Bytes twice = size + ((size > 4) & (size - 4)) + ((size == 7) & 2);  // 0 1 2 3 4 6 8 12
  const Bytes below = code > 7;  // all ones where negative
  return (vi)(((twice ^ below) - below) + 12);
}
#endif
inline vf fp8(vi words, int step) {
  const vs up = (vs)(words << static_cast<uint32_t>(24 - 8 * step));
  const vi bits = (vi)(up >> 4) & 0x87f00000u;
  return (vf)bits * set1(0x1p120f);
}

// Values 4 * step to 4 * step + 3 of a block of an odd width: a word that has all of them, in each lane without the bits of the others, so
// that a multiplication by a power of two moves them down. It is read from memory no later than the block's end.
template <int Bits, int Block>
inline vf unpack(const uint8_t* block, int step) {
  constexpr int kLast = Block * Bits / 8 - 4;
  const int bit = step * 4 * Bits, begin = bit / 8 < kLast ? bit / 8 : kLast;
  int up = bit - 8 * begin;
  uint32_t word;
  __builtin_memcpy(&word, block + begin, sizeof word);
  vi words = vi{word, word, word, word};
  if (up + 4 * Bits > 31) {  // none may have the bit of a sign
    words = words >> static_cast<uint32_t>(up);
    up = 0;
  }
  constexpr uint32_t kMask = (1u << Bits) - 1;
  const vi fields = vi{kMask, kMask << Bits, kMask << 2 * Bits, kMask << 3 * Bits} << static_cast<uint32_t>(up);
  const vf down = vf{1, 1.0f / (1 << Bits), 1.0f / (1 << 2 * Bits), 1.0f / (1 << 3 * Bits)} * set1(1.0f / static_cast<float>(1 << up));
  return to_float(words & fields) * down;
}
template <int Bits>
inline vf unpacked(vf values, int) {
  return values;
}

struct Spread {
  vs index;
  explicit Spread(int lane_shift) {
    for (int i = 0; i < W; ++i) index[i] = i >> lane_shift;
  }
  vf pick(const float* scales, int64_t from) const {
    const vs at = index + static_cast<int32_t>(from);
    return vf{scales[at[0]], scales[at[1]], scales[at[2]], scales[at[3]]};
  }
};

inline void store_sums4(float* p, vf a, vf b, vf c, vf d) {
  p[0] = sum(a);
  p[1] = sum(b);
  p[2] = sum(c);
  p[3] = sum(d);
}
inline vf sums(const vf (&v)[W]) { return vf{sum(v[0]), sum(v[1]), sum(v[2]), sum(v[3])}; }

inline void transpose(vf (&v)[W]) {
  const vf a = v[0], b = v[1], c = v[2], d = v[3];
  for (int i = 0; i < W; ++i) v[i] = vf{a[i], b[i], c[i], d[i]};
}

}  // namespace headrace::HEADRACE_ISA
