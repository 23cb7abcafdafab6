// The vector vocabulary that kernels are written in, for the instruction set of this translation unit.
//
// CMakeLists.txt compiles the .cpp files of this folder once per instruction set, with its name as HEADRACE_ISA. They may instantiate
// only static functions and those of namespace headrace::HEADRACE_ISA: the linker might keep an inline function compiled with AVX-512
// for all.
//
// vf: W floats, vi: W dwords. load_first/store_first touch n <= W elements and fill with zeros.
//
// A function that kernels of every set call is needed in all three simd_*.h files.
// Guard: runtime/native/tests/driver.cpp runs all C++ tests on every set that the processor has; sanitize.sh emulates aarch64.
#pragma once

#if defined(HEADRACE_AVX512)
#include "simd_avx512.h"
#elif defined(HEADRACE_AVX2)
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif

namespace headrace::HEADRACE_ISA {

// Prefetch a cache line to the L2, which allows more outstanding requests than the L1. Always inlined: GCC 12 removes some calls, as of a
// function without effect.
[[gnu::always_inline]] inline void request(const void* line) { __builtin_prefetch(line, 0, 2); }

// e^x to about 2 ulp; 0 below -87, NaN for NaN (the order of min's and max's operands matters). Range reduction by ln 2 in two parts, then
// a Taylor polynomial on |r| <= ln(2) / 2 with a remainder under 1e-8.
inline vf exp(vf x) {
  const vf bounded = min(set1(88.0f), max(set1(-87.0f), x));
  const vf whole = round_even(mul(bounded, set1(1.44269504f)));
  vf r = fma(whole, set1(-0.693359375f), bounded);
  r = fma(whole, set1(2.12194440e-4f), r);
  vf p = set1(1.0f / 5040);
  p = fma(p, r, set1(1.0f / 720));
  p = fma(p, r, set1(1.0f / 120));
  p = fma(p, r, set1(1.0f / 24));
  p = fma(p, r, set1(1.0f / 6));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r, set1(1.0f));
  p = fma(p, r, set1(1.0f));
  return unless_below(x, -87.0f, times_power_of_two(p, whole));
}

#if !defined(HEADRACE_AVX512)
// 2^x for -126 <= x <= 0, and 2^-126 below, to 3e-6 of it. NaN stays NaN: the order of max's operands matters.
inline vf exp2_roughly(vf x) {
  const vf bounded = max(set1(-126.0f), x);
  const vf whole = round_even(bounded);
  const vf r = sub(bounded, whole);
  vf p = fma(r, set1(0.00957010195f), set1(0.0559178616f));
  p = fma(p, r, set1(0.240247448f));
  p = fma(p, r, set1(0.693121815f));
  p = fma(p, r, set1(0.999999261f));
  return times_power_of_two(p, whole);
}
#endif

inline vf tanh(vf x) { return sub(set1(1.0f), div(set1(2.0f), add(exp(add(x, x)), set1(1.0f)))); }

inline vf load_any(const void* base, Type type, int64_t i) {
  if (type == Type::f16) return load_as<Type::f16>(base, i);
  if (type == Type::bf16) return load_as<Type::bf16>(base, i);
  if (type == Type::e8m0) return load_as<Type::e8m0>(base, i);
  if (type == Type::e4m3) return load_as<Type::e4m3>(base, i);
  return load_as<Type::f32>(base, i);
}

inline vf load_first_any(const void* base, Type type, int64_t i, int64_t n) {
  if (type == Type::f16) return load_first_as<Type::f16>(base, i, n);
  if (type == Type::bf16) return load_first_as<Type::bf16>(base, i, n);
  if (type == Type::e8m0) return load_first_as<Type::e8m0>(base, i, n);
  if (type == Type::e4m3) return load_first_as<Type::e4m3>(base, i, n);
  return load_first_as<Type::f32>(base, i, n);
}

}  // namespace headrace::HEADRACE_ISA
