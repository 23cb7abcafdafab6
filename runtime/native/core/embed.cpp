// Rows of a matrix as floats (embed.h). Scalar: a step looks up a row or a few. It decodes every format of Matrix, interleaved or not.
// Guards: test_embedding in runtime/native/tests/projections.cpp, and tests/runtime/ops/test_native_kernels.py.
#include "embed.h"

#include <algorithm>

#include "half.h"
#include "interleaved.h"

namespace headrace {
namespace {

// The i-th number of an array of a type.
float number(const void* stored, Type type, int64_t i) {
  if (type == Type::f16) return load_scalar<Type::f16>(stored, i);
  if (type == Type::e8m0) return load_scalar<Type::e8m0>(stored, i);
  if (type == Type::e4m3) return load_scalar<Type::e4m3>(stored, i);
  return type == Type::bf16 ? load_scalar<Type::bf16>(stored, i) : load_scalar<Type::f32>(stored, i);
}

// The number that a code stands for, before scale and offset. kFp4: E2M1, sign in the highest bit.
float value_of(uint32_t code, Code kind) {
  static constexpr float kFp4[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
  if (kind == Code::fp4) return kFp4[code];
  const auto byte = static_cast<uint8_t>(code);
  return kind == Code::fp8 ? load_scalar<Type::e4m3>(&byte, 0) : static_cast<float>(code);
}

// One row of a matrix of `columns` elements (dwords of weights, or groups' scales): element i is at first + i * step.
struct Row {
  int64_t first, step;

  Row(const Matrix& w, int64_t row, int64_t columns)
      : first(w.rounds() ? row / kBand * kBand * columns + row % kBand : row * columns), step(w.rounds() ? kBand : 1) {}
  int64_t operator[](int64_t i) const { return first + i * step; }
};

// out (K): row `row` of w.
void read_row(const Matrix& w, int64_t row, float* out) {
  if (!w.quantized()) {
    for (int64_t i = 0; i < w.k; ++i) out[i] = number(w.data, w.type, row * w.k + i);
    return;
  }
  const auto* words = static_cast<const uint32_t*>(w.data);
  const Row word(w, row, w.k * w.bits / 32), group(w, row, w.groups());
  const uint32_t mask = (1u << w.bits) - 1;
  // Weight i of planes (interleaved.h). Blocks of 5 bits have 32 weights: 4 dwords of the low four bits of eight each, then one
  // of high bits; those of 6 bits 16 weights, in 2 dwords and one. Of 5 bits weight 10 is in bits 8 to 11 of dword 1 and bit 10 of dword 4.
  const auto planed = [&](int64_t i) {
    const int64_t block = i / planed_weights(w.bits) * planed_words(w.bits);
    const auto weight = static_cast<int>(i % planed_weights(w.bits));
    const uint32_t low = words[word[block + weight / 8]] >> weight % 8 * 4;
    const uint32_t high = words[word[block + low_planes(w.bits)]] >> high_bit(w.bits, weight);
    return ((low & 15) | high << 4) & mask;
  };
  for (int64_t g = 0; g < w.groups(); ++g) {
    const float scale = number(w.scales, w.type, group[g]);
    const float middle = w.symmetric() ? -scale * static_cast<float>(1 << (w.bits - 1)) : 0.0f;
    const float offset = w.offsets == nullptr ? middle : number(w.offsets, w.type, group[g]);
    for (int64_t i = g * w.group; i < (g + 1) * w.group; ++i) {
      if (w.planed()) {
        out[i] = scale * static_cast<float>(planed(i)) + offset;
        continue;
      }
      const int64_t bit = i * w.bits, at = bit / 32, shift = bit % 32;
      uint64_t bits = words[word[at]];
      if (shift + w.bits > 32) bits |= static_cast<uint64_t>(words[word[at + 1]]) << 32;
      out[i] = scale * value_of(static_cast<uint32_t>(bits >> shift & mask), w.code) + offset;
    }
  }
}

}  // namespace

void run_embed(const Matrix& w, const uint32_t* tokens, int64_t count, float* out, int64_t first, float outside) {
  for (int64_t i = 0; i < count; ++i, out += w.k) {
    const int64_t row = static_cast<int64_t>(tokens[i]) - first;
    if (row >= 0 && row < w.n) {
      read_row(w, row, out);
    } else {
      std::fill(out, out + w.k, outside);
    }
  }
}

}  // namespace headrace
