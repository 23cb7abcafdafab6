// float16 and bfloat16 to and from float32, one number at a time, round to nearest even.
//
// Guard: runtime/native/tests/halves.cpp compares all numbers of both formats with their definition.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace headrace {

static inline float bits_to_float(uint32_t bits) {
  float f;
  __builtin_memcpy(&f, &bits, sizeof f);
  return f;
}
static inline uint32_t float_to_bits(float f) {
  uint32_t bits;
  __builtin_memcpy(&bits, &f, sizeof bits);
  return bits;
}

static inline float f16_to_f32(uint16_t h) {
#if defined(__aarch64__)
  __fp16 f;
  __builtin_memcpy(&f, &h, sizeof f);
  return static_cast<float>(f);
#else
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
  const uint32_t magnitude = h & 0x7fff;
  if (magnitude >= 0x7c00) return bits_to_float(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  // Subnormals are whole multiples of 2^-24. As a subnormal float32, one would cost Intel's processors 150 cycles.
  const float subnormal = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f;
  const uint32_t bits = magnitude < 0x400 ? float_to_bits(subnormal) : (magnitude << 13) + (112u << 23);
  return bits_to_float(sign | bits);
#endif
}

static inline uint16_t f32_to_f16(float f) {
#if defined(__aarch64__)
  const __fp16 h = static_cast<__fp16>(f);
  uint16_t out;
  __builtin_memcpy(&out, &h, sizeof out);
  return out;
#else
  const uint32_t bits = float_to_bits(f);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
  if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // rounds to 65536 or above
  if (magnitude < 0x38800000) {  // subnormal result: adding 0.5 aligns and rounds the significand
    const float aligned = bits_to_float(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (float_to_bits(aligned) - 0x3f000000));
  }
  const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
  return static_cast<uint16_t>(sign | ((rounded >> 13) - (112u << 10)));
#endif
}

static inline float bf16_to_f32(uint16_t h) { return bits_to_float(static_cast<uint32_t>(h) << 16); }

static inline uint16_t f32_to_bf16(float f) {
  const uint32_t bits = float_to_bits(f);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// The i-th number of an array of type T. E8M0 is a power of two, 2^(byte - 127); E4M3 has the bits of a float32's exponent and fraction
// moved, times 2^120 for the difference of the exponents' biases.
template <Type T>
static inline float load_scalar(const void* base, int64_t i) {
  if constexpr (T == Type::f32) return static_cast<const float*>(base)[i];
  if constexpr (T == Type::e8m0 || T == Type::e4m3) {
    const uint32_t byte = static_cast<const uint8_t*>(base)[i];
    if constexpr (T == Type::e8m0) return bits_to_float(byte == 0 ? 0x400000 : byte << 23);
    return bits_to_float((byte & 0x80) << 24 | (byte & 0x7f) << 20) * 0x1p120f;  // right for subnormals too
  }
  const uint16_t raw = static_cast<const uint16_t*>(base)[i];
  return T == Type::f16 ? f16_to_f32(raw) : bf16_to_f32(raw);
}

}  // namespace headrace
