// Half precision, every number of it: the way to float32 and back, and rounding to the nearest even.
#include <cmath>

#include "checks.h"

namespace headrace::tests {
namespace {

// What the 16 bits mean, from the definition of the format: 1 sign, `exponent_bits`, the rest significand.
double meaning(uint16_t bits, int exponent_bits) {
  const int fraction_bits = 15 - exponent_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = bits >> fraction_bits & ((1 << exponent_bits) - 1);
  const int fraction = bits & ((1 << fraction_bits) - 1);
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - fraction_bits);
  return sign * std::ldexp(fraction + (1 << fraction_bits), exponent - bias - fraction_bits);
}

template <class ToFloat, class FromFloat>
void test_format(int exponent_bits, ToFloat to_float, FromFloat from_float, const char* name) {
  const uint16_t infinity = static_cast<uint16_t>(((1 << exponent_bits) - 1) << (15 - exponent_bits));
  bool read = true, kept = true, rounded = true, nans = true;
  for (uint32_t i = 0; i < 0x10000; ++i) {
    const auto bits = static_cast<uint16_t>(i);
    const uint16_t magnitude = bits & 0x7fff;
    const float value = to_float(bits);
    if (magnitude > infinity) {
      nans = nans && std::isnan(value) && std::isnan(to_float(from_float(value)));
      continue;
    }
    kept = kept && from_float(value) == bits;
    if (magnitude == infinity) {
      read = read && std::isinf(value);
      continue;
    }
    read = read && static_cast<double>(value) == meaning(bits, exponent_bits);
    if (magnitude + 1 == infinity) continue;
    // Halfway to the next number away from zero is a float32: it goes to the even one, its neighbours to the nearer one.
    const float next = to_float(static_cast<uint16_t>(bits + 1));
    const auto middle = static_cast<float>((static_cast<double>(value) + next) / 2);
    const auto even = static_cast<uint16_t>(bits + (bits & 1));
    rounded = rounded && from_float(middle) == even && from_float(std::nextafterf(middle, value)) == bits &&
              from_float(std::nextafterf(middle, next)) == bits + 1;
  }
  check(read, "reading half precision", name);
  check(kept, "half precision there and back", name);
  check(rounded, "rounding to half precision", name);
  check(nans, "NaN in half precision", name);
}

}  // namespace

void test_halves() {
  test_format(5, f16_to_f32, f32_to_f16, "float16");
  test_format(8, bf16_to_f32, f32_to_bf16, "bfloat16");
}

}  // namespace headrace::tests
