// Unpackers of GGUF's block types, one for each layout of ggml-common.h, and the bit streams of their codes (blocks.h).
//
// Most types store w = d * (q - middle) or d * q + m, so that their codes stay, and the bias is -middle * d or m. A block has its
// parts back to back, without padding; offsets below are bytes. Numbers are little-endian, as on every processor that this builds for.
#include "blocks.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "half.h"

namespace headrace {
namespace {

float half_at(const uint8_t* at) {
  uint16_t bits;
  std::memcpy(&bits, at, sizeof bits);
  return f16_to_f32(bits);
}

// Codes of two to a byte: the low halves of all bytes first, then the high ones.
template <int Bytes>
void nibbles(const uint8_t* packed, uint8_t* codes) {
  for (int i = 0; i < Bytes; ++i) {
    codes[i] = packed[i] & 15;
    codes[i + Bytes] = packed[i] >> 4;
  }
}

// half d; 32 nibbles
void unpack_q4_0(const uint8_t* block, uint8_t* codes, float* scales, float* biases) {
  nibbles<16>(block + 2, codes);
  scales[0] = half_at(block);
  biases[0] = -8 * scales[0];
}

// half d, m; 32 nibbles
void unpack_q4_1(const uint8_t* block, uint8_t* codes, float* scales, float* biases) {
  nibbles<16>(block + 4, codes);
  scales[0] = half_at(block);
  biases[0] = half_at(block + 2);
}

// 32 codes: a bit each in 4 bytes, above the nibbles that follow.
void five_bits(const uint8_t* high, uint8_t* codes) {
  nibbles<16>(high + 4, codes);
  for (int i = 0; i < 4; ++i) {
    // Eight codes, a byte each: bit j of the byte in byte j of a word, then in the highest bit there, then in the fifth.
    const uint64_t apart = uint64_t{high[i]} * 0x0101010101010101 & 0x8040201008040201;
    const uint64_t fifth = ((apart + 0x7f7f7f7f7f7f7f7f) & 0x8080808080808080) >> 3;
    uint64_t eight;
    std::memcpy(&eight, codes + 8 * i, 8);
    eight |= fifth;
    std::memcpy(codes + 8 * i, &eight, 8);
  }
}

// half d; 32 high bits; 32 nibbles
void unpack_q5_0(const uint8_t* block, uint8_t* codes, float* scales, float* biases) {
  five_bits(block + 2, codes);
  scales[0] = half_at(block);
  biases[0] = -16 * scales[0];
}

// half d, m; 32 high bits; 32 nibbles
void unpack_q5_1(const uint8_t* block, uint8_t* codes, float* scales, float* biases) {
  five_bits(block + 4, codes);
  scales[0] = half_at(block);
  biases[0] = half_at(block + 2);
}

// half d; 32 signed bytes
void unpack_q8_0(const uint8_t* block, uint8_t* codes, float* scales, float* biases) {
  for (int i = 0; i < 32; ++i) codes[i] = block[2 + i] ^ 0x80;  // flipping the sign bit adds 128
  scales[0] = half_at(block);
  biases[0] = -128 * scales[0];
}

// Scales and biases of Q4_K and Q5_K: half d, m; eight 6-bit factors of each. The first four are in the low bits of 4 bytes each; the
// last four have their low 4 bits in a third group of 4 bytes, and the upper 2 in the high bits of the first two.
void k_scales(const uint8_t* block, float* scales, float* biases) {
  const float d = half_at(block), m = half_at(block + 2);
  const uint8_t *first = block + 4, *second = block + 8, *third = block + 12;
  for (int i = 0; i < 4; ++i) {
    // Exact: an 11-bit times a 6-bit significand fits float32.
    scales[i] = d * static_cast<float>(first[i] & 63);
    biases[i] = -m * static_cast<float>(second[i] & 63);
    scales[i + 4] = d * static_cast<float>((third[i] & 15) | (first[i] >> 6 << 4));
    biases[i + 4] = -m * static_cast<float>((third[i] >> 4) | (second[i] >> 6 << 4));
  }
}

// scales, 16 bytes; 256 nibbles, 64 at a time
void unpack_q4_k(const uint8_t* block, uint8_t* codes, float* scales, float* biases) {
  k_scales(block, scales, biases);
  for (int pair = 0; pair < 4; ++pair) nibbles<32>(block + 16 + 32 * pair, codes + 64 * pair);
}

// scales, 16 bytes; 32 bytes with a high bit of each group; 256 nibbles
void unpack_q5_k(const uint8_t* block, uint8_t* codes, float* scales, float* biases) {
  k_scales(block, scales, biases);
  for (int pair = 0; pair < 4; ++pair) nibbles<32>(block + 48 + 32 * pair, codes + 64 * pair);
  for (int group = 0; group < 8; ++group) {
    for (int i = 0; i < 32; ++i) codes[32 * group + i] |= static_cast<uint8_t>((block[16 + i] >> group & 1) << 4);
  }
}

// 256 nibbles, 128 at a time; two high bits of each, of four weights 32 apart in a byte; 16 signed factors; half d
void unpack_q6_k(const uint8_t* block, uint8_t* codes, float* scales, float* biases) {
  for (int half = 0; half < 2; ++half) {
    const uint8_t* high = block + 128 + 32 * half;
    uint8_t* out = codes + 128 * half;
    nibbles<64>(block + 64 * half, out);
    for (int part = 0; part < 4; ++part) {
      for (int i = 0; i < 32; ++i) out[32 * part + i] |= static_cast<uint8_t>((high[i] >> 2 * part & 3) << 4);
    }
  }
  const float d = half_at(block + 208);
  for (int i = 0; i < 16; ++i) {
    scales[i] = d * static_cast<float>(static_cast<int8_t>(block[192 + i]));
    biases[i] = -32 * scales[i];
  }
}

// The values of IQ4's codes, -127 to 113, as affine codes: 128 is added.
constexpr uint8_t kIq4[] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

// half d; 32 nibbles
void unpack_iq4_nl(const uint8_t* block, uint8_t* codes, float* scales, float* biases) {
  nibbles<16>(block + 2, codes);
  for (int i = 0; i < 32; ++i) codes[i] = kIq4[codes[i]];
  scales[0] = half_at(block);
  biases[0] = -128 * scales[0];
}

// half d; eight 6-bit factors, which begin at -32: the high 2 bits of all in 2 bytes, the low 4 in 4; 256 nibbles, 32 at a time
void unpack_iq4_xs(const uint8_t* block, uint8_t* codes, float* scales, float* biases) {
  const float d = half_at(block);
  for (int group = 0; group < 8; ++group) {
    nibbles<16>(block + 8 + 16 * group, codes + 32 * group);
    const int high = block[2 + group / 4] >> 2 * (group % 4) & 3;
    const int low = block[4 + group / 2] >> 4 * (group % 2) & 15;
    scales[group] = d * static_cast<float>((low | high << 4) - 32);
    biases[group] = -128 * scales[group];
  }
  for (int i = 0; i < 256; ++i) codes[i] = kIq4[codes[i]];
}

// Twice the values of FP4's codes, -12 to 12, as affine codes: 12 is added.
constexpr uint8_t kFp4[] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
constexpr int kMostExponent = 251;  // so that the largest code times the scale is finite in float32

// Exponent e of a power of two; 32 nibbles. The scale is 2^(e - 128), half of that of FP4's own values.
void unpack_mxfp4(const uint8_t* block, uint8_t* codes, float* scales, float* biases) {
  nibbles<16>(block + 1, codes);
  for (int i = 0; i < 32; ++i) codes[i] = kFp4[codes[i]];
  const uint32_t e = block[0];
  scales[0] = e > kMostExponent ? NAN : bits_to_float(e < 2 ? 0x200000u << e : (e - 1) << 23);  // subnormal below 2
  biases[0] = -12 * scales[0];
}

// The same with FP4's own codes, for MLX's mode mxfp4. The scales, the exponents' bytes, are the caller's.
void unpack_fp4(const uint8_t* block, uint8_t* codes, float* scales, float* biases) {
  nibbles<16>(block + 1, codes);
  scales[0] = biases[0] = 0;
}

constexpr int64_t kTaskWeights = 1 << 14;
constexpr int kLeastGroup = 16;

// 8 codes, a byte each, as 8 * Bits bits: the upper one of two neighbours moves down to the lower one, then pairs, then fours.
template <int Bits>
uint64_t squeezed(uint64_t codes) {
  constexpr uint64_t kLow[] = {0x00ff00ff00ff00ff, 0x0000ffff0000ffff, 0x00000000ffffffff};
  for (int step = 0; step < 3; ++step) {
    const int width = 8 << step, used = Bits << step;  // bits of a field, and those that codes take
    codes = (codes & kLow[step]) | (codes >> (width - used) & kLow[step] << used);
  }
  return codes;
}

// 32 codes, a byte each, to a bit stream of 4 * Bits bytes, which is written in whole machine words.
template <int Bits>
void pack_32(const uint8_t* codes, uint8_t* out) {
  uint64_t a, b, c, d;
  std::memcpy(&a, codes, 8);
  std::memcpy(&b, codes + 8, 8);
  std::memcpy(&c, codes + 16, 8);
  std::memcpy(&d, codes + 24, 8);
  const auto write = [out](int word, uint64_t bits) { std::memcpy(out + 8 * word, &bits, 8); };
  if constexpr (Bits < 8) {
    a = squeezed<Bits>(a), b = squeezed<Bits>(b), c = squeezed<Bits>(c), d = squeezed<Bits>(d);
  }
  if constexpr (Bits == 4) {
    write(0, a | b << 32);
    write(1, c | d << 32);
  } else if constexpr (Bits == 5) {
    write(0, a | b << 40);
    write(1, b >> 24 | c << 16 | d << 56);
    const auto last = static_cast<uint32_t>(d >> 8);
    std::memcpy(out + 16, &last, 4);
  } else if constexpr (Bits == 6) {
    write(0, a | b << 48);
    write(1, b >> 16 | c << 32);
    write(2, c >> 32 | d << 16);
  } else {
    write(0, a), write(1, b), write(2, c), write(3, d);
  }
}

// Unpacks blocks one after the other.
template <auto Unpack, int Bytes, int Weights, int Bits, int Group>
void unpack_all(const uint8_t* blocks, int64_t count, uint8_t* codes, float* scales, float* biases) {
  for (int64_t block = 0; block < count; ++block) {
    uint8_t apart[Weights];
    Unpack(blocks + block * Bytes, apart, scales + block * (Weights / Group), biases + block * (Weights / Group));
    uint8_t* out = codes + block * (Weights / 8 * Bits);
    for (int at = 0; at < Weights; at += 32) pack_32<Bits>(apart + at, out + at / 8 * Bits);
  }
}

template <auto Unpack, int Bytes, int Weights, int Bits, int Group = 32>
constexpr BlockType type(const char* name) {
  return {name, Bytes, Weights, Bits, Group, unpack_all<Unpack, Bytes, Weights, Bits, Group>};
}

constexpr BlockType kTypes[] = {
    type<unpack_q4_0, 18, 32, 4>("Q4_0"),
    type<unpack_q4_1, 20, 32, 4>("Q4_1"),
    type<unpack_q5_0, 22, 32, 5>("Q5_0"),
    type<unpack_q5_1, 24, 32, 5>("Q5_1"),
    type<unpack_q8_0, 34, 32, 8>("Q8_0"),
    type<unpack_q4_k, 144, 256, 4>("Q4_K"),
    type<unpack_q5_k, 176, 256, 5>("Q5_K"),
    type<unpack_q6_k, 210, 256, 6, 16>("Q6_K"),
    type<unpack_iq4_nl, 18, 32, 8>("IQ4_NL"),
    type<unpack_iq4_xs, 136, 256, 8>("IQ4_XS"),
    type<unpack_mxfp4, 17, 32, 5>("MXFP4"),
    type<unpack_fp4, 17, 32, 4>("MXFP4 codes"),
};

// Bits of 2^-14, the smallest normal number of float16, and of 65536, the first one beyond its range.
constexpr uint32_t kHalfNormal = 0x38800000, kHalfEnd = 0x47800000;

bool all_finite(const float* numbers, int64_t count) {
  bool finite = true;
  for (int64_t i = 0; i < count; ++i) finite = finite & ((float_to_bits(numbers[i]) & 0x7f800000) != 0x7f800000);
  return finite;
}

// Writes finite numbers in their type. Returns whether it has all of them.
bool store(const float* numbers, int64_t count, Type type, void* to, int64_t at) {
  if (type == Type::f32) {
    std::memcpy(static_cast<float*>(to) + at, numbers, sizeof(float) * static_cast<size_t>(count));
    return true;
  }
  auto* out = static_cast<uint16_t*>(to) + at;
  // Nearly all are zeros and normal numbers of float16 that lose no bit: without branches, so that compilers use vectors.
  uint32_t others = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = float_to_bits(numbers[i]), magnitude = bits & 0x7fffffff;
    const uint32_t normal = 0u - static_cast<uint32_t>(magnitude - kHalfNormal < kHalfEnd - kHalfNormal);  // all bits set
    const uint32_t zero = 0u - static_cast<uint32_t>(magnitude == 0);
    out[i] = static_cast<uint16_t>((bits >> 16 & 0x8000) | (((magnitude >> 13) - (112u << 10)) & normal));
    others |= ~(normal | zero) | (bits & 0x1fff);
  }
  if (others == 0) return true;
  bool exact = true;
  for (int64_t i = 0; i < count; ++i) {
    out[i] = f32_to_f16(numbers[i]);
    exact = exact && f16_to_f32(out[i]) == numbers[i];
  }
  return exact;
}

}  // namespace

const BlockType* block_type(std::string_view name) {
  for (const BlockType& each : kTypes) {
    if (each.name == name) return &each;
  }
  return nullptr;
}

Unpacked unpack_blocks(Pool& pool, const BlockType& type, const uint8_t* blocks, int64_t count, const AffineGroups& to) {
  const int64_t at_once = kTaskWeights / type.weights;  // blocks of a task
  const int64_t groups_each = type.weights / type.group;
  std::atomic<bool> finite{true}, exact{true};
  pool.run((count + at_once - 1) / at_once, [&](Tasks& tasks) {
    float scales[kTaskWeights / kLeastGroup], biases[kTaskWeights / kLeastGroup];
    while (tasks.next()) {
      const int64_t first = tasks.index() * at_once, here = std::min(at_once, count - first);
      type.unpack(blocks + first * type.bytes, here, to.codes + first * type.weights / 8 * type.bits, scales, biases);
      if (to.scales == nullptr) continue;
      const int64_t groups = here * groups_each, at = first * groups_each;
      // Within the task: the region may end, and these variables with it, when no task is left.
      if (!all_finite(scales, groups) || !all_finite(biases, groups)) finite = false;
      if (!store(scales, groups, to.type, to.scales, at)) exact = false;
      if (!store(biases, groups, to.type, to.biases, at)) exact = false;
    }
  });
  return {finite, exact};
}

}  // namespace headrace
