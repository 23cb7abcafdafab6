// Packing, unpacking and attention: K/V in the layout of core/packed.h. The attention of a few queries has both
// products in integers.
//
// A query is rounded to 16 bits, its largest magnitude / 32767, and multiplied with the codes of keys: sums are exact within a group,
// then scaled. For values, an entry's softmax weight times its group's scale is rounded to 15 bits of the largest in the chunk (not
// relative to the weight alone, because of attention sinks). No sum passes 31 bits: 64 * 32767 * 255 in a group of keys,
// 128 * 32767 * 255 in a chunk. Masked entries have weight 0 and never matter, NaN scales included.
//
// Guard: runtime/native/tests/packed.cpp; tests/runtime/ops/test_packed_attention.py.
#include "../core/half.h"
#include "../core/packed.h"
#include "attention.h"
#include "parts.h"
#include "rounded.h"

namespace headrace::HEADRACE_ISA {

constexpr int kTileVectors = kTile / W;
constexpr int64_t kMostGroup = 64;
constexpr int64_t kAskEntries = 16;  // of values, between requests for the next chunk
using PackedRequests = Requests<W == 16 ? 3 : 2>;  // two chunks of 8 bits, of heads of 64, fit an L1 of 48 KB, not one of 32
static_assert(kTile % W == 0 && kAttendChunk % kTile == 0);

template <int Bits>
constexpr int kLow = Bits == 8 ? 8 : 4;  // bits of a number in the dwords of codes
template <int Bits>
constexpr int kHigh = Bits - kLow<Bits>;  // its other bits, in dwords of their own
template <int Bits>
constexpr int kZero = 1 << (Bits - 1);  // the code of 0
using Dwords = uint32_t __attribute__((vector_size(sizeof(vi))));

// The first high bit of a key's number i, in the dword of 32 / kHigh numbers.
template <int Bits>
constexpr int high_bit(int64_t i) {
  return static_cast<int>(i % 8 / 2 * 8 + (i / 8 % Planes<Bits>::kLow * 2 + i % 2) * kHigh<Bits>);
}

template <int... Lane>
inline vi fifth_bits_of(const char* row, int64_t i, std::integer_sequence<int, Lane...>) {
  const auto* from = reinterpret_cast<const uint32_t*>(row) + i % kHighWords;
  const auto shift = static_cast<int>(i / kHighWords * 2);
  if constexpr (W <= kHighWords) {
    return shift_right(load_words(from), shift);
  } else {  // the lanes after those have the next two bits
    const auto once = (Dwords)load_first_words(from, kHighWords);
    const Dwords shifts = {static_cast<uint32_t>(shift + Lane / kHighWords * 2)...};
    return (vi)(__builtin_shufflevector(once, once, (Lane % kHighWords)...) >> shifts);
  }
}

// Dwords whose bytes have in their two lowest bits the fifth bits of both numbers of a byte of values: of the dwords from the i-th on
// of a row of four entries.
inline vi fifth_bits(const char* row, int64_t i) { return fifth_bits_of(row, i, std::make_integer_sequence<int, W>()); }

// Pair `step` of the numbers of dwords of codes; high: their high bits, those of a byte in its lowest bits.
template <int Bits>
inline vi pair_of(vi codes, vi high, int step) {
  if constexpr (kHigh<Bits> != 0) return Planes<Bits>::take(codes, high, step);
  return pairs<Bits>(codes, step);
}

// --- writing and unpacking ----------------------------------------------------------------------------------------

// The least float16 >= x; x is finite or NaN.
inline uint16_t half_above(float x) {
  const uint16_t half = f32_to_f16(x);
  if (!(f16_to_f32(half) < x)) return half;
  return static_cast<uint16_t>(half & 0x8000 ? half - 1 : half + 1);
}

// The codes of a group of `count` numbers; returns their scale, rounded up, so that codes are in range and errors within half a scale.
template <int Bits>
inline uint16_t code_group(const float* x, int64_t count, uint8_t* codes) {
  constexpr float kLeast = -kZero<Bits>, kMost = kZero<Bits> - 1;
  vf spoiled = zero(), top = set1(1e-30f);
  for (int64_t i = 0; i < count; i += W) {
    const vf v = load(x + i);
    top = max(top, max(v, mul(v, set1(kMost / kLeast))));
    spoiled = add(spoiled, sub(v, v));
  }
  const uint16_t half = half_above(maximum(top) / kMost + sum(spoiled));
  const float scale = f16_to_f32(half), inverse = scale > 0 ? 1 / scale : 0.0f;
  for (int64_t i = 0; i < count; i += W) {
    const vf bounded = min(set1(kMost), max(set1(kLeast), round_even(mul(load(x + i), set1(inverse)))));
    alignas(64) float raised[W];  // by 2^23: its lowest byte is the code
    store(raised, add(bounded, set1(0x1p23f + kZero<Bits>)));
    for (int j = 0; j < W; ++j) codes[i + j] = static_cast<uint8_t>(float_to_bits(raised[j]));
  }
  return half;
}

// Calls write(codes, begin, size) for each group's numbers.
template <int Bits, class Write>
inline void pack_row(const float* row, int64_t dim, const Packing& packing, int64_t entry, char* to, Write write) {
  uint8_t codes[kMostGroup];
  auto* scale = reinterpret_cast<uint16_t*>(to) + entry;
  for (int64_t begin = 0; begin < dim; begin += packing.group, scale += kAttendChunk) {
    const int64_t size = dim - begin < packing.group ? dim - begin : packing.group;
    *scale = code_group<Bits>(row + begin, size, codes);
    write(codes, begin, size);
  }
}

template <int Bits>
inline void pack_key_of(const float* row, int64_t dim, const Packing& packing, int64_t entry, char* keys) {
  constexpr int64_t kEach = 32 / kLow<Bits>;
  const PackedPart part(packing, dim);
  char* tile = keys + part.codes + entry / kTile * part.row * kTile + entry % kTile * 4;
  pack_row<Bits>(row, dim, packing, entry, keys, [&](const uint8_t* codes, int64_t begin, int64_t size) {
    for (int64_t i = 0; i < size; i += kEach) {
      uint32_t word = 0;
      for (int64_t j = 0; j < kEach; ++j) word |= (codes[i + j] & ((1u << kLow<Bits>) - 1)) << (j * kLow<Bits>);
      __builtin_memcpy(tile + (begin + i) / kEach * 4 * kTile, &word, sizeof word);
    }
    if constexpr (kHigh<Bits> != 0) {
      constexpr int64_t kNumbers = 32 / kHigh<Bits>, kWords = kMostGroup / kNumbers;
      uint32_t high[kWords] = {};
      for (int64_t i = 0; i < size; ++i) high[i / kNumbers] |= static_cast<uint32_t>(codes[i] >> 4) << high_bit<Bits>(i);
      for (int64_t j = 0; j < kWords; ++j) {
        __builtin_memcpy(tile + (dim / 8 + begin / kNumbers + j) * 4 * kTile, &high[j], sizeof high[j]);
      }
    }
  });
}

void pack_key(const float* row, int64_t dim, const Packing& packing, int64_t entry, char* keys) {
  if (packing.bits == 8) return pack_key_of<8>(row, dim, packing, entry, keys);
  return pack_key_of<6>(row, dim, packing, entry, keys);
}

// Order of the entries in a dword of values: pairs of codes are two bytes apart.
constexpr int byte_of(int64_t entry) { return static_cast<int>(entry >> 1 | (entry & 1) << 1); }

template <int Bits>
inline void pack_value_of(const float* row, int64_t dim, const Packing& packing, int64_t entry, char* values) {
  const PackedPart part(packing, dim);
  pack_row<Bits>(row, dim, packing, entry, values, [&](const uint8_t* codes, int64_t begin, int64_t size) {
    const int64_t across = Bits == 8 ? size : size / 2;
    char* to = values + part.codes + kAttendChunk * begin * kLow<Bits> / 8 + entry / 4 * across * 4 + byte_of(entry % 4);
    if constexpr (Bits == 8) {
      for (int64_t i = 0; i < across; ++i) to[4 * i] = static_cast<char>(codes[i]);
    } else {
      for (int64_t i = 0; i < across; ++i) to[4 * i] = static_cast<char>((codes[i] & 15) | codes[i + across] << 4);
    }
    if constexpr (Bits == 5) {
      to = values + part.high + (kAttendChunk * begin / packing.group + entry / 4 * 4) * kHighWords + byte_of(entry % 4);
      for (int64_t lane = 0; lane < kHighWords; ++lane) {
        int bits = 0;
        for (int64_t i = lane; i < across; i += kHighWords) {
          bits |= (codes[i] >> 4 | codes[i + across] >> 4 << 1) << (i / kHighWords * 2);
        }
        to[4 * lane] = static_cast<char>(bits);
      }
    }
  });
}

void pack_value(const float* row, int64_t dim, const Packing& packing, int64_t entry, char* values) {
  switch (packing.bits) {
    case 4: return pack_value_of<4>(row, dim, packing, entry, values);
    case 5: return pack_value_of<5>(row, dim, packing, entry, values);
    default: return pack_value_of<8>(row, dim, packing, entry, values);
  }
}

// The number of `bits` at a bit of each lane's dword.
inline vf code_at(vi words, int bit, int bits) {
  return to_float((vi)((Dwords)words >> static_cast<uint32_t>(bit) & ((1u << bits) - 1)));
}

template <int Bits>
inline void unpack_keys_of(const char* keys, int64_t dim, const Packing& packing, int64_t begin, int64_t n, float* out) {
  constexpr int kEach = 32 / kLow<Bits>;
  const PackedPart part(packing, dim);
  for (int64_t entry = begin; entry < begin + n; entry += W) {
    const char* tile = keys + part.codes + entry / kTile * part.row * kTile + entry % kTile * 4;
    const auto words_at = [&](int64_t word) { return load_words(reinterpret_cast<const uint32_t*>(tile + word * 4 * kTile)); };
    float* rows = out + (entry - begin) * dim;
    for (int64_t d = 0; d < dim; d += W) {
      const vf scale = load_as<Type::f16>(keys, d / packing.group * kAttendChunk + entry);
      const vf offset = mul(scale, set1(-kZero<Bits>));
      vf square[W];
      for (int64_t i = d; i < d + W; ++i) {
        vf code = code_at(words_at(i / kEach), static_cast<int>(i % kEach) * kLow<Bits>, kLow<Bits>);
        if constexpr (kHigh<Bits> != 0) {
          const vf high = code_at(words_at(dim / 8 + i / (32 / kHigh<Bits>)), high_bit<Bits>(i), kHigh<Bits>);
          code = fma(high, set1(16.0f), code);
        }
        square[i - d] = fma(code, scale, offset);
      }
      transpose(square);
      for (int i = 0; i < W; ++i) store(rows + i * dim + d, square[i]);
    }
  }
}

void unpack_keys(const char* keys, int64_t dim, const Packing& packing, int64_t begin, int64_t n, float* out) {
  if (packing.bits == 8) return unpack_keys_of<8>(keys, dim, packing, begin, n, out);
  return unpack_keys_of<6>(keys, dim, packing, begin, n, out);
}

template <int Bits>
inline void unpack_values_of(const char* values, int64_t dim, const Packing& packing, int64_t begin, int64_t n, float* out) {
  const PackedPart part(packing, dim);
  for (int64_t d = 0, g = 0; d < dim; d += packing.group, ++g) {
    const int64_t size = dim - d < packing.group ? dim - d : packing.group, across = Bits == 8 ? size : size / 2;
    const char* codes = values + part.codes + kAttendChunk * d * kLow<Bits> / 8;
    const char* fifth = values + part.high + g * kAttendChunk * kHighWords;
    for (int64_t entry = begin; entry < begin + n; entry += 4) {
      for (int64_t i = 0; i < across; i += W) {
        const int64_t here = across - i < W ? across - i : W;
        const vi words = load_first_words(reinterpret_cast<const uint32_t*>(codes) + entry / 4 * across + i, here);
        vi high{};
        if constexpr (Bits == 5) high = fifth_bits(fifth + entry * kHighWords, i);
        for (int e = 0; e < 4; ++e) {
          const vf scale = set1(load_scalar<Type::f16>(values, g * kAttendChunk + entry + e));
          const vf offset = mul(scale, set1(-kZero<Bits>));
          for (int half = 0; half < 8 / kLow<Bits>; ++half) {
            vf code = code_at(words, 8 * byte_of(e) + 4 * half, kLow<Bits>);
            if constexpr (Bits == 5) code = fma(code_at(high, 8 * byte_of(e) + half, 1), set1(16.0f), code);
            store_first(out + (entry - begin + e) * dim + d + i + half * across, fma(code, scale, offset), here);
          }
        }
      }
    }
  }
}

void unpack_values(const char* values, int64_t dim, const Packing& packing, int64_t begin, int64_t n, float* out) {
  switch (packing.bits) {
    case 4: return unpack_values_of<4>(values, dim, packing, begin, n, out);
    case 5: return unpack_values_of<5>(values, dim, packing, begin, n, out);
    default: return unpack_values_of<8>(values, dim, packing, begin, n, out);
  }
}

// --- attending ----------------------------------------------------------------------------------------------------

inline float whole_word(float x) {  // bits of an integer's dword; 0 for NaN, which is in the scales
  return __builtin_bit_cast(float, static_cast<int32_t>(x > -2e9f && x < 2e9f ? x : 0.0f));
}

// A rounded query: pairs in the order of the keys' codes; per group the sum of its rounded numbers times that of codes of 0, negative, as
// a dword.
struct PackedQuery {
  float* pairs;
  float* biases;
  float scale;
};

template <int Bits>
inline void round_query(const float* x, int64_t dim, const Packing& packing, PackedQuery& query) {
  vf spoiled = zero();
  const float top = largest(x, dim, spoiled);
  query.scale = top / 32767 + sum(spoiled);
  for (int64_t begin = 0, g = 0; begin < dim; begin += packing.group, ++g) {
    const int64_t size = dim - begin < packing.group ? dim - begin : packing.group;
    const float whole = sum(round_values<16 / kLow<Bits>>(x + begin, size, 32767 / top, query.pairs + begin / 2));
    query.biases[g] = whole_word(-kZero<Bits> * whole);
  }
}

// scores[j * ld + i] = q . k for the tile of entries from `first` on. Asks for `bytes` with each group.
template <int Bits, int Q>
inline void score_tile(const char* keys, const PackedPart& part, const Packing& packing, int64_t dim, const PackedQuery* q,
                       int64_t first, float* scores, int64_t ld, PackedRequests& requests, int64_t bytes) {
  constexpr int V = kTileVectors, kSteps = 16 / kLow<Bits>, kApart = W == 16 ? 2 : 1;  // separate sums shorten the chain of additions
  const auto* codes = reinterpret_cast<const uint32_t*>(keys + part.codes + first * part.row);
  const auto* high_codes = codes + dim / 8 * kTile;
  vf total[Q][V];
  for (int j = 0; j < Q; ++j) {
    for (int v = 0; v < V; ++v) total[j][v] = zero();
  }
  vi high[V] = {};
  int64_t word = 0;
  for (int64_t begin = 0, g = 0; begin < dim; begin += packing.group, ++g) {
    const int64_t end = begin + packing.group < dim ? (begin + packing.group) * kLow<Bits> / 32 : dim * kLow<Bits> / 32;
    requests.some(bytes);
    vi acc[Q][V][kApart];
#pragma GCC unroll 4
    for (int j = 0; j < Q; ++j) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
#pragma GCC unroll 2
        for (int a = 0; a < kApart; ++a) acc[j][v][a] = a == 0 ? set1_word(q[j].biases + g) : vi{};
      }
    }
    for (; word < end; ++word) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        const vi words = load_words(codes + word * kTile + v * W);
        if constexpr (kHigh<Bits> != 0) {
          constexpr int64_t kSharing = Planes<Bits>::kLow;  // dwords of codes that share one of high bits
          const bool next = word % kSharing == 0;
          high[v] = next ? load_words(high_codes + word / kSharing * kTile + v * W) : shift_right(high[v], 2 * kHigh<Bits>);
        }
#pragma GCC unroll 4
        for (int s = 0; s < kSteps; ++s) {
          const vi code = pair_of<Bits>(words, high[v], s);
#pragma GCC unroll 4
          for (int j = 0; j < Q; ++j) {
            vi& to = acc[j][v][s % kApart];
            to = dot_pairs_with(to, code, q[j].pairs + word * kSteps + s);
          }
        }
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      const int64_t at = g * kAttendChunk + first + v * W;
      const vf scale = load_as<Type::f16>(keys, at);
#pragma GCC unroll 4
      for (int j = 0; j < Q; ++j) {
        const vi whole = kApart == 1 ? acc[j][v][0] : add_words(acc[j][v][0], acc[j][v][kApart - 1]);
        total[j][v] = fma(to_float(whole), scale, total[j][v]);
      }
    }
  }
  for (int j = 0; j < Q; ++j) {
    for (int v = 0; v < V; ++v) store(scores + j * ld + v * W, mul(total[j][v], set1(q[j].scale)));
  }
}

// Rounded weights of a group's values for one query: pairs, their unit, and their sum times the code of 0, negative, as a dword.
struct Weights {
  float* pairs;
  float unit;
  float bias;
};

template <int Bits>
inline void round_weights(const float* scores, const char* scales, int64_t begin, int64_t end, float* added, Weights& weights) {
  vf largest = set1(1e-30f), total = zero();
  for (int64_t p = begin; p < end; p += W) {
    const vf weight = load(scores + p), here = where_above(weight, 0.0f, mul(weight, load_as<Type::f16>(scales, p)));
    store(added + p, here);
    largest = max(largest, here);
    total = add(total, here);
  }
  const float top = maximum(largest), spoiled = sum(total) * 0.0f;  // NaN if anything is not finite
  const vf factor = set1(32767 / top);
  vi all{};
  for (int64_t p = begin; p < end; p += W) {
    const vi whole = to_whole(mul(load(added + p), factor));
    store_halves(weights.pairs + p / 2, whole);
    all = add_words(all, whole);
  }
  weights.unit = top / 32767 + spoiled;
  weights.bias = whole_word(-kZero<Bits> * sum(to_float(all)));
}

// acc of each query at [at, ...) of V vectors of a group's dwords, `across` to a row of four entries, from the i-th on: all entries
// [begin, end). Asks for `bytes` with every kAskEntries entries.
template <int Bits, int Q, int V>
[[gnu::noinline]] void weigh_codes(const char* codes, const char* fifth, int64_t across, int64_t i, int64_t begin, int64_t end,
                                   const Weights (&weights)[Q], const Softmax* states, int64_t at, PackedRequests& requests,
                                   int64_t bytes) {
  constexpr int H = 8 / kLow<Bits>;  // numbers of a byte
  // Separate sums shorten the chain of additions where one instruction multiplies and adds: rows at once, and sums of a number.
  constexpr int R = W == 16 && Q * V * H < 4 ? 2 : 1, kSums = W == 16 ? 2 * R : 1;
  const int64_t here = across - i < W ? across - i : W;
  PackedRequests ask = requests;
  vi acc[Q][V][H][kSums];
#pragma GCC unroll 4
  for (int j = 0; j < Q; ++j) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
#pragma GCC unroll 2
      for (int h = 0; h < H; ++h) {
#pragma GCC unroll 4
        for (int r = 0; r < kSums; ++r) acc[j][v][h][r] = r == 0 ? set1_word(&weights[j].bias) : vi{};
      }
    }
  }
  const char* row = codes + (begin / 4 * across + i) * 4;
  for (int64_t p = begin; p < end; p += 4 * R, row += across * 4 * R) {
    if ((p - begin) % kAskEntries == 0) ask.some(bytes);
#pragma GCC unroll 4
    for (int part = 0; part < V * R; ++part) {
      const int v = part % V, r = part / V;
      const auto* from = reinterpret_cast<const uint32_t*>(row) + r * across + v * W;
      const vi words = here == W || W < 16 ? load_words(from) : load_first_words(from, here);  // parts of groups have 8 at least
      vi high{};
      if constexpr (Bits == 5) high = fifth_bits(fifth + (p + 4 * r) * kHighWords, i + v * W);
#pragma GCC unroll 4
      for (int step = 0; step < 2 * H; ++step) {
        const vi code = pair_of<Bits>(words, high, step);
#pragma GCC unroll 4
        for (int j = 0; j < Q; ++j) {
          vi& to = acc[j][v][step % H][(2 * r + step / H) % kSums];
          to = dot_pairs_with(to, code, weights[j].pairs + p / 2 + 2 * r + step / H);
        }
      }
    }
  }
  requests = ask;
#pragma GCC unroll 4
  for (int j = 0; j < Q; ++j) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
#pragma GCC unroll 2
      for (int h = 0; h < H; ++h) {
        vi whole = acc[j][v][h][0];
#pragma GCC unroll 4
        for (int r = 1; r < kSums; ++r) whole = add_words(whole, acc[j][v][h][r]);
        store_first(states[j].acc + at + i + v * W + h * across, mul(to_float(whole), set1(weights[j].unit)), here);
      }
    }
  }
}

// Vectors of dwords that weigh_codes takes at once.
template <int Bits, int Q>
constexpr int kCodeVectors = Bits == 8 ? (W == 16 ? (Q < 4 ? 2 : 1) : kTileVectors) : (W == 4 ? 2 : 1);

// Calls of weigh_codes for all groups.
template <int Bits, int Q>
inline int64_t code_passes(const Packing& packing, int64_t dim) {
  constexpr int64_t columns = kCodeVectors<Bits, Q> * W;
  int64_t passes = 0;
  for (int64_t d = 0; d < dim; d += packing.group) {
    const int64_t size = dim - d < packing.group ? dim - d : packing.group, across = Bits == 8 ? size : size / 2;
    passes += across / columns + (across % columns + W - 1) / W;
  }
  return passes;
}

template <int Bits, int Q>
inline void weigh_packed(const char* values, const Packing& packing, int64_t dim, int64_t begin, int64_t end, const float* scores,
                         Softmax* states, float* room, PackedRequests& requests) {
  constexpr int V = kCodeVectors<Bits, Q>;
  const int64_t bytes = requests.share(((end - begin) + kAskEntries - 1) / kAskEntries * code_passes<Bits, Q>(packing, dim));
  Weights weights[Q];
  for (int j = 0; j < Q; ++j, room += kAttendChunk / 2) weights[j].pairs = room;
  const PackedPart part(packing, dim);
  for (int64_t d = 0, g = 0; d < dim; d += packing.group, ++g) {
    const int64_t size = dim - d < packing.group ? dim - d : packing.group, across = Bits == 8 ? size : size / 2;
    const char* scales = values + g * kAttendChunk * 2;
    for (int j = 0; j < Q; ++j) round_weights<Bits>(scores + j * kAttendChunk, scales, begin, end, room, weights[j]);
    const char* codes = values + part.codes + kAttendChunk * d * kLow<Bits> / 8;
    const char* fifth = values + part.high + g * kAttendChunk * kHighWords;
    int64_t i = 0;
    for (; i + V * W <= across; i += V * W) {
      weigh_codes<Bits, Q, V>(codes, fifth, across, i, begin, end, weights, states, d, requests, bytes);
    }
    for (; i < across; i += W) weigh_codes<Bits, Q, 1>(codes, fifth, across, i, begin, end, weights, states, d, requests, bytes);
  }
}

template <int K, int Q>
inline void attend_packed_of(const Chunk& chunk, const Packings& packings, int64_t dim, const float* const* q, ScoreRule rule,
                             float* scores, Softmax* states) {
  constexpr int64_t ld = kAttendChunk;
  const PackedPart keys(packings.keys, dim);
  const int64_t groups = packings.keys.groups(dim);
  PackedRequests own{chunk.own, {}}, next{chunk.next[0], chunk.next[1]};
  own.rest();
  PackedQuery query[Q];
  float* room = scores + Q * ld;
  for (int j = 0; j < Q; ++j) {
    query[j] = {room, room + dim / 2, 0};
    round_query<K>(q[j], dim, packings.keys, query[j]);
    room += dim / 2 + groups;
  }
  const int64_t begin = chunk.first / kTile * kTile, end = (chunk.first + chunk.n + kTile - 1) / kTile * kTile;
  const int64_t bytes = next.share((end - begin) / kTile * groups * 2);  // scores and the softmax take half of the time
  for (int64_t p = begin; p < end; p += kTile) {
    score_tile<K, Q>(chunk.keys, keys, packings.keys, dim, query, p, scores + p, ld, next, bytes);
  }
  const int64_t lo = chunk.first - begin;
  softmax_rows(scores + begin, ld, Q, end - begin, lo, lo + chunk.n, rule, states);
  const auto weigh = packings.values.bits == 8 ? weigh_packed<8, Q> : packings.values.bits == 5 ? weigh_packed<5, Q> : weigh_packed<4, Q>;
  weigh(chunk.values, packings.values, dim, begin, end, scores, states, room, next);
  next.rest();
}

template <int K>
inline void attend_packed_keys(const Chunk& chunk, const Packings& packings, int64_t dim, const float* const* q, int64_t queries,
                               ScoreRule rule, float* scores, Softmax* states) {
  switch (queries) {
    case 1: return attend_packed_of<K, 1>(chunk, packings, dim, q, rule, scores, states);
    case 2: return attend_packed_of<K, 2>(chunk, packings, dim, q, rule, scores, states);
    case 3: return attend_packed_of<K, 3>(chunk, packings, dim, q, rule, scores, states);
    default: return attend_packed_of<K, 4>(chunk, packings, dim, q, rule, scores, states);
  }
}

void attend_packed(const Chunk& chunk, const Packings& packings, int64_t dim, const float* const* q, int64_t queries, ScoreRule rule,
                   float* scores, Softmax* states) {
  if (packings.keys.bits == 8) return attend_packed_keys<8>(chunk, packings, dim, q, queries, rule, scores, states);
  return attend_packed_keys<6>(chunk, packings, dim, q, queries, rule, scores, states);
}

}  // namespace headrace::HEADRACE_ISA
