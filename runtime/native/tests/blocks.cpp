// Unpacking of GGUF's blocks within guarded memory: the same at once and a block at a time, at several counts of threads, and bit
// streams, read one bit at a time. tests/models/gguf/test_tensors.py compares the values with the reference.
#include "../core/blocks.h"

#include <cmath>
#include <cstring>
#include <utility>

#include "checks.h"

namespace headrace::tests {
namespace {

constexpr const char* kNames[] = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K",
                                  "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4", "MXFP4 codes"};

int code_at(const uint8_t* stream, int64_t index, int bits) {
  int code = 0;
  for (int i = 0; i < bits; ++i) {
    const int64_t bit = index * bits + i;
    code |= (stream[bit / 8] >> bit % 8 & 1) << i;
  }
  return code;
}

bool same(float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); }

void test_type(const BlockType& type, int64_t count, Type kind) {
  const Guarded blocks = random_bytes(count * type.bytes);
  const int64_t weights = count * type.weights, groups = weights / type.group;
  const int64_t number_bytes = kind == Type::f16 ? 2 : 4;
  Guarded codes(weights / 8 * type.bits), scales(groups * number_bytes), biases(groups * number_bytes);
  const AffineGroups to{codes.as<uint8_t>(), kind, scales.as(), biases.as()};
  const Unpacked unpacked = unpack_blocks(Pool::shared(), type, blocks.as<uint8_t>(), count, to);

  // The same, a block at a time
  bool codes_hold = true, numbers_hold = true, finite = true, exact = true;
  const int groups_each = type.weights / type.group, bytes_each = type.weights / 8 * type.bits;
  for (int64_t block = 0; block < count; ++block) {
    Guarded block_codes(bytes_each), block_scales(4 * groups_each), block_biases(4 * groups_each);
    type.unpack(blocks.as<uint8_t>() + block * type.bytes, 1, block_codes.as<uint8_t>(), block_scales.as<float>(),
                block_biases.as<float>());
    const uint8_t* got = codes.as<uint8_t>() + block * bytes_each;
    codes_hold = codes_hold && std::memcmp(got, block_codes.as(), static_cast<size_t>(bytes_each)) == 0;
    for (int i = 0; i < groups_each; ++i) {
      for (const auto& [wanted, stored] : {std::pair{block_scales.as<float>()[i], &scales}, {block_biases.as<float>()[i], &biases}}) {
        const float rounded = kind == Type::f16 ? f16_to_f32(f32_to_f16(wanted)) : wanted;
        numbers_hold = numbers_hold && same(number(stored->as(), kind, block * groups_each + i), rounded);
        finite = finite && std::isfinite(wanted);
        exact = exact && rounded == wanted;
      }
    }
  }
  check(codes_hold, "codes of blocks", type.name);
  check(numbers_hold, "scales and biases of blocks", type.name);
  check(unpacked.finite == finite, "whether scales are finite", type.name);
  check(unpacked.exact == exact || !finite, "whether scales are exact", type.name);
}

// The bit streams, from their definition: the codes of a block of 32, by index.
void test_streams() {
  for (const auto& [name, bits] : {std::pair{"Q4_0", 4}, {"Q5_0", 5}, {"Q8_0", 8}}) {
    const BlockType& type = *block_type(name);
    const Guarded block = random_bytes(type.bytes);
    Guarded stream(4 * bits), scale(4), bias(4);
    type.unpack(block.as<uint8_t>(), 1, stream.as<uint8_t>(), scale.as<float>(), bias.as<float>());
    const uint8_t* bytes = block.as<uint8_t>() + type.bytes - (bits == 8 ? 32 : 16);
    const uint8_t* high = block.as<uint8_t>() + 2;
    bool holds = true;
    for (int i = 0; i < 32; ++i) {
      int code = bits == 8 ? bytes[i] ^ 0x80 : bytes[i % 16] >> (i < 16 ? 0 : 4) & 15;
      if (bits == 5) code |= (high[i / 8] >> i % 8 & 1) << 4;
      holds = holds && code_at(stream.as<uint8_t>(), i, bits) == code;
    }
    check(holds, "a bit stream of codes", name);
  }
}

}  // namespace

void test_blocks() {
  test_streams();
  const int threads = Pool::shared().threads();
  check(block_type("Q4_2") == nullptr, "an unknown type of blocks", "blocks");
  for (const char* name : kNames) {
    const BlockType* type = block_type(name);
    check(type != nullptr, "a type of blocks", name);
    if (type == nullptr) continue;
    for (const int64_t weights : {256, 3 * 256, (1 << 14) + 256, 3 << 14}) {  // one block to several tasks
      for (const Type kind : {Type::f32, Type::f16}) {
        Pool::shared().set_threads(weights % 3 + 1);
        test_type(*type, weights / type->weights, kind);
      }
    }
  }
  Pool::shared().set_threads(threads);
}

}  // namespace headrace::tests
