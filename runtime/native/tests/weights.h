// Random weights in any storage format, for the kernels and as doubles.
//
// projections.cpp and experts.cpp compare products of `view` and `rounded` with sums of `full`; rows.cpp uses xielu.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "../core/interleaved.h"
#include "checks.h"

namespace headrace::tests {

// Storage format of a matrix; bits = 0 for plain numbers.
struct Format {
  int bits = 0;
  int group = 0;
  Type type = Type::f32;
  Code code = Code::affine;
  bool symmetric = false;  // the rounded view has no offsets
};

constexpr Type kTypes[] = {Type::f32, Type::f16, Type::bf16};

// mxfp4, nvfp4, mxfp8, 6 bits in groups of 16, and symmetric integers.
constexpr Format kOtherFormats[] = {
    {4, 32, Type::e8m0, Code::fp4}, {4, 16, Type::e4m3, Code::fp4}, {8, 32, Type::e8m0, Code::fp8},
    {6, 16, Type::f32},             {6, 16, Type::f16},             {6, 16, Type::bf16},
    {4, 32, Type::f16, Code::affine, true}, {4, 32, Type::bf16, Code::affine, true},
    {8, 32, Type::f16, Code::affine, true}, {8, 32, Type::bf16, Code::affine, true},
    {5, 32, Type::f16, Code::affine, true}, {5, 32, Type::bf16, Code::affine, true},
    {6, 32, Type::f16, Code::affine, true}, {6, 16, Type::bf16, Code::affine, true},
    {6, 16, Type::f32, Code::affine, true},
};

// A matrix for float32 products (`view`), for rounded activations (`rounded`), and as doubles.
struct Weights {
  Matrix view, rounded;
  Guarded data, scales, offsets;
  std::vector<Guarded> interleaved;  // for `rounded`
  std::vector<double> full;  // (N, K)

  Weights(int64_t n, int64_t k, const Format& format)
      : view(shape(n, k, format)),
        data(format.bits == 0 ? stored(random_floats(n * k), format.type) : random_bytes(n * view.row_bytes())),
        scales(random_scales(n * view.groups(), format)),
        offsets(stored(affine() ? offsets_of(n * view.groups(), format) : random_floats(0), affine() ? format.type : Type::f32)),
        full(static_cast<size_t>(n * k)) {
    view.data = data.as();
    view.scales = scales.as();
    if (affine()) view.offsets = offsets.as();
    if (format.code == Code::fp8) keep_finite(data, n * view.row_bytes());
    for (int64_t r = 0; r < n; ++r) {
      for (int64_t i = 0; i < k; ++i) full[r * k + i] = at(r, i);
    }
    rounded = view;
    rounded.exact = false;
    if (!rounded.rounds()) return;
    if (rounded.planed()) {
      Guarded planes(n * view.row_bytes());
      split_planes(format.bits, data.as<uint32_t>(), n * k * format.bits / 32, planes.as<uint32_t>());
      rounded.data = turn_all<uint32_t>(planes, k * format.bits / 32);
    } else {
      rounded.data = turn_all<uint32_t>(data, k * format.bits / 32);
    }
    rounded.scales = turn_numbers(scales);
    rounded.offsets = affine() && !format.symmetric ? turn_numbers(offsets) : nullptr;
  }

 private:
  static Matrix shape(int64_t n, int64_t k, const Format& format) {
    Matrix m;
    m.n = n;
    m.k = k;
    m.bits = format.bits;
    m.group = format.group;
    m.code = format.code;
    m.type = format.type;
    m.exact = true;
    return m;
  }

  bool affine() const { return view.code == Code::affine; }

  std::vector<float> offsets_of(int64_t count, const Format& format) const {
    if (!format.symmetric) return random_floats(count);
    std::vector<float> values(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) {
      values[i] = static_cast<float>(-(1 << (format.bits - 1)) * number(scales.as(), format.type, i));
    }
    return values;
  }

  // E8M0: powers of two from 2^-27 to 2^13, whose products stay finite in float32, and the least there is, 2^-127.
  // E4M3: any but NaN, without a sign.
  static Guarded random_scales(int64_t count, const Format& format) {
    if (format.code == Code::affine) return stored(random_floats(count), format.type);
    Guarded bytes = random_bytes(count);
    if (format.type == Type::e4m3) {
      for (int64_t i = 0; i < count; ++i) bytes.as<uint8_t>()[i] &= 0x7f;
      keep_finite(bytes, count);
      return bytes;
    }
    for (int64_t i = 0; i < count; ++i) {
      uint8_t& byte = bytes.as<uint8_t>()[i];
      // The exponent of E8M0 is 127 less: 100 to 140 are -27 to 13.
      byte = byte == 0 ? 0 : static_cast<uint8_t>(100 + byte % 41);
    }
    return bytes;
  }

  // E4M3 has one NaN of either sign.
  static void keep_finite(Guarded& bytes, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      if ((bytes.as<uint8_t>()[i] & 0x7f) == 0x7f) bytes.as<uint8_t>()[i] ^= 1;
    }
  }

  template <class T>
  const void* turn_all(const Guarded& rows, int64_t columns) {
    interleaved.emplace_back(bands(view.n) * kBand * columns * static_cast<int64_t>(sizeof(T)));
    interleave(Pool::shared(), rows.as<T>(), view.n, columns, interleaved.back().as<T>());
    return interleaved.back().as();
  }

  const void* turn_numbers(const Guarded& numbers) {
    switch (size_of(view.type)) {
      case 1: return turn_all<uint8_t>(numbers, view.groups());
      case 2: return turn_all<uint16_t>(numbers, view.groups());
      default: return turn_all<uint32_t>(numbers, view.groups());
    }
  }

  // Weight k of a row by the definition of its format, from the bytes of `view`: `bits` bits from bit k * bits on, in two bytes at most.
  double at(int64_t row, int64_t k) const {
    if (view.bits == 0) return number(data.as(), view.type, row * view.k + k);
    const int64_t bit = k * view.bits;
    const auto* bytes = data.as<uint8_t>() + row * view.row_bytes() + bit / 8;
    uint32_t q = bytes[0];
    if (bit % 8 + view.bits > 8) q |= static_cast<uint32_t>(bytes[1]) << 8;
    q = q >> bit % 8 & ((1u << view.bits) - 1);
    const int64_t g = row * view.groups() + k / view.group;
    const double scale = number(scales.as(), view.type, g);
    if (view.code == Code::fp8) return scale * number(bytes, Type::e4m3, 0);
    if (view.code == Code::fp4) {  // a sign, two bits of exponent, one of fraction
      const uint32_t exponent = q >> 1 & 3, fraction = q & 1;
      const double size = exponent == 0 ? 0.5 * fraction : std::ldexp(1 + 0.5 * fraction, static_cast<int>(exponent) - 1);
      return (q & 8) != 0 ? -scale * size : scale * size;
    }
    return scale * q + number(offsets.as(), view.type, g);
  }
};

// xIELU, by its formula.
inline double xielu(double x, const Curve& c) {
  return c.beta * x + (x > 0 ? c.positive * x * x : c.negative * (std::expm1(std::min<double>(x, c.eps)) - x));
}

// The gated activations.
inline double gated(double g, double u, Act act) {
  if (act == Act::silu) return g / (1 + std::exp(-g)) * u;
  if (act == Act::gelu) return 0.5 * g * (1 + std::tanh(0.7978845608028654 * (g + 0.044715 * g * g * g))) * u;
  g = std::min(g, 7.0);
  return g / (1 + std::exp(-1.702 * g)) * (std::clamp(u, -7.0, 7.0) + 1);
}

}  // namespace headrace::tests
