// Attention of a few queries over packed K/V (core/packed.h), with both products in integers.
//
// A query is rounded to 16 bits, its largest magnitude / 32767, and multiplied with the codes of keys: sums are exact within a group,
// then scaled. For values, an entry's softmax weight times its group's scale is rounded to 15 bits of the largest in the chunk (not
// relative to the weight alone, because of attention sinks). No sum passes 31 bits: 64 * 32767 * 255 in a group of keys,
// 128 * 32767 * 255 in a chunk. Masked entries have weight 0 and never matter, NaN scales included.
#include "../core/half.h"
#include "../core/packed.h"
#include "attention.h"
#include "parts.h"
#include "rounded.h"

namespace headrace::HEADRACE_ISA {

constexpr int kTileVectors = kTile / W;
constexpr int64_t kMostGroup = 64;
static_assert(kTile % W == 0 && kAttendChunk % kTile == 0);

// --- writing and unpacking ----------------------------------------------------------------------------------------

// The least float16 >= x; x is finite or NaN.
inline uint16_t half_above(float x) {
  const uint16_t half = f32_to_f16(x);
  if (!(f16_to_f32(half) < x)) return half;
  return static_cast<uint16_t>(half & 0x8000 ? half - 1 : half + 1);
}

// The codes of a group of `count` numbers, its scale and offset. Scales are rounded up and offsets down, so that codes are in range
// and errors within half a scale.
inline void code_group(const float* x, int64_t count, bool offset, uint16_t* scale_at, uint16_t* offset_at, uint8_t* codes) {
  vf spoiled = zero(), low = load(x), high = low;
  const float top = largest(x, count, spoiled);
  float from = -128.0f, most = 127.0f;  // range of codes
  float base = 0;
  if (offset) {
    for (int64_t i = W; i < count; i += W) low = min(low, load(x + i)), high = max(high, load(x + i));
    const uint16_t below = half_above(maximum(sub(zero(), low))) ^ 0x8000;
    *offset_at = below;
    base = f16_to_f32(below);
    from = 0.0f;
    most = 15.0f;
  }
  *scale_at = half_above((offset ? maximum(high) - base : top) / most + sum(spoiled));
  const float scale = f16_to_f32(*scale_at), inverse = scale > 0 ? 1 / scale : 0.0f;
  for (int64_t i = 0; i < count; i += W) {
    const vf whole = round_even(mul(sub(load(x + i), set1(base)), set1(inverse)));
    const vf bounded = min(set1(most), max(set1(offset ? 0.0f : -most), whole));
    alignas(64) float raised[W];  // by 2^23: its lowest byte is the code
    store(raised, add(bounded, set1(0x1p23f - from)));
    for (int j = 0; j < W; ++j) codes[i + j] = static_cast<uint8_t>(float_to_bits(raised[j]));
  }
}

template <class Write>
inline void pack_row(const float* row, int64_t dim, const Packing& packing, int64_t entry, char* to, Write write) {
  const PackedPart part(packing, dim);
  uint8_t codes[kMostGroup];
  for (int64_t begin = 0, g = 0; begin < dim; begin += packing.group, ++g) {
    const int64_t size = dim - begin < packing.group ? dim - begin : packing.group, at = g * kAttendChunk + entry;
    code_group(row + begin, size, packing.offset(), reinterpret_cast<uint16_t*>(to + part.scales) + at,
               reinterpret_cast<uint16_t*>(to + part.offsets) + at, codes);
    write(to + part.codes, codes, begin, size);
  }
}

void pack_key(const float* row, int64_t dim, const Packing& packing, int64_t entry, char* keys) {
  pack_row(row, dim, packing, entry, keys, [&](char* to, const uint8_t* codes, int64_t begin, int64_t size) {
    to += entry / kTile * kTile * dim * packing.bits / 8 + begin * packing.bits / 8 * kTile + entry % kTile * 4;
    const int64_t each = 32 / packing.bits;
    for (int64_t i = 0; i < size; i += each, to += 4 * kTile) {
      uint32_t word = 0;
      for (int64_t j = 0; j < each; ++j) word |= static_cast<uint32_t>(codes[i + j]) << (j * packing.bits);
      __builtin_memcpy(to, &word, sizeof word);
    }
  });
}

// Order of the entries in a dword of values: pairs of codes are two bytes apart.
constexpr int byte_of(int64_t entry) { return static_cast<int>(entry >> 1 | (entry & 1) << 1); }

void pack_value(const float* row, int64_t dim, const Packing& packing, int64_t entry, char* values) {
  pack_row(row, dim, packing, entry, values, [&](char* to, const uint8_t* codes, int64_t begin, int64_t size) {
    const int64_t across = packing.bits == 8 ? size : size / 2;
    to += kAttendChunk * begin * packing.bits / 8 + entry / 4 * across * 4 + byte_of(entry % 4);
    for (int64_t i = 0; i < across; ++i) {
      to[4 * i] = static_cast<char>(packing.bits == 8 ? codes[i] : codes[i] | codes[i + across] << 4);
    }
  });
}

// The code of `bits` at a bit of each lane's dword.
inline vf code_at(vi words, int bit, int bits) {
  using Dwords = uint32_t __attribute__((vector_size(sizeof(vi))));
  return to_float((vi)((Dwords)words >> static_cast<uint32_t>(bit) & ((1u << bits) - 1)));
}

template <int Bits>
inline void unpack_keys_of(const char* keys, int64_t dim, const Packing& packing, int64_t begin, int64_t n, float* out) {
  constexpr int kEach = 32 / Bits;
  const PackedPart part(packing, dim);
  for (int64_t entry = begin; entry < begin + n; entry += W) {
    const char* tile = keys + part.codes + entry / kTile * kTile * dim * Bits / 8 + entry % kTile * 4;
    float* rows = out + (entry - begin) * dim;
    for (int64_t d = 0; d < dim; d += W) {
      const int64_t at = d / packing.group * kAttendChunk + entry;
      const vf scale = load_as<Type::f16>(keys + part.scales, at);
      const vf offset = Bits == 8 ? mul(scale, set1(-128.0f)) : load_as<Type::f16>(keys + part.offsets, at);
      vf square[W];
      for (int i = 0; i < W; ++i) {
        const vi words = load_words(reinterpret_cast<const uint32_t*>(tile + (d + i) / kEach * 4 * kTile));
        square[i] = fma(code_at(words, static_cast<int>((d + i) % kEach) * Bits, Bits), scale, offset);
      }
      transpose(square);
      for (int i = 0; i < W; ++i) store(rows + i * dim + d, square[i]);
    }
  }
}

void unpack_keys(const char* keys, int64_t dim, const Packing& packing, int64_t begin, int64_t n, float* out) {
  if (packing.bits == 8) return unpack_keys_of<8>(keys, dim, packing, begin, n, out);
  return unpack_keys_of<4>(keys, dim, packing, begin, n, out);
}

void unpack_values(const char* values, int64_t dim, const Packing& packing, int64_t begin, int64_t n, float* out) {
  const PackedPart part(packing, dim);
  for (int64_t d = 0, g = 0; d < dim; d += packing.group, ++g) {
    const int64_t size = dim - d < packing.group ? dim - d : packing.group, across = packing.bits == 8 ? size : size / 2;
    const char* codes = values + part.codes + kAttendChunk * d * packing.bits / 8;
    for (int64_t entry = begin; entry < begin + n; entry += 4) {
      vf scale[4], offset[4];
      for (int e = 0; e < 4; ++e) {
        const int64_t at = g * kAttendChunk + entry + e;
        const float shared = load_scalar<Type::f16>(values + part.scales, at);
        scale[e] = set1(shared);
        offset[e] = set1(packing.bits == 8 ? -128.0f * shared : load_scalar<Type::f16>(values + part.offsets, at));
      }
      for (int64_t i = 0; i < across; i += W) {
        const int64_t here = across - i < W ? across - i : W;
        const vi words = load_first_words(reinterpret_cast<const uint32_t*>(codes) + entry / 4 * across + i, here);
        for (int e = 0; e < 4; ++e) {
          float* to = out + (entry - begin + e) * dim + d + i;
          if (packing.bits == 8) {
            store_first(to, fma(code_at(words, 8 * byte_of(e), 8), scale[e], offset[e]), here);
          } else {
            store_first(to, fma(code_at(words, 8 * byte_of(e), 4), scale[e], offset[e]), here);
            store_first(to + across, fma(code_at(words, 8 * byte_of(e) + 4, 4), scale[e], offset[e]), here);
          }
        }
      }
    }
  }
}

// --- attending ----------------------------------------------------------------------------------------------------

inline float whole_word(float x) {  // bits of an integer's dword; 0 for NaN, which is in the scales
  return __builtin_bit_cast(float, static_cast<int32_t>(x > -2e9f && x < 2e9f ? x : 0.0f));
}

// A rounded query: pairs in the order of the keys' codes; per group the sum of its rounded numbers, and -128 times that as a dword.
struct PackedQuery {
  float* pairs;
  float* sums;
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
    query.sums[g] = sum(round_values<16 / Bits>(x + begin, size, 32767 / top, query.pairs + begin / 2));
    query.biases[g] = whole_word(-128.0f * query.sums[g]);
  }
}

// scores[j * ld + i] = q . k for the tile of entries from `first` on.
template <int Bits, int Q>
inline void score_tile(const char* keys, const PackedPart& part, const Packing& packing, int64_t dim, const PackedQuery* q,
                       int64_t first, float* scores, int64_t ld) {
  constexpr int V = kTileVectors, kSteps = 16 / Bits, kApart = W == 16 ? 2 : 1;  // separate sums shorten the chain of additions
  const char* codes = keys + part.codes + first * dim * Bits / 8;
  vf total[Q][V];
  for (int j = 0; j < Q; ++j) {
    for (int v = 0; v < V; ++v) total[j][v] = zero();
  }
  int64_t word = 0;
  for (int64_t begin = 0, g = 0; begin < dim; begin += packing.group, ++g) {
    const int64_t end = begin + packing.group < dim ? (begin + packing.group) * Bits / 32 : dim * Bits / 32;
    vi acc[Q][V][kApart];
#pragma GCC unroll 4
    for (int j = 0; j < Q; ++j) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
#pragma GCC unroll 2
        for (int a = 0; a < kApart; ++a) acc[j][v][a] = a == 0 && Bits == 8 ? set1_word(q[j].biases + g) : vi{};
      }
    }
    for (; word < end; ++word) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        const vi words = load_words(reinterpret_cast<const uint32_t*>(codes + (word * kTile + v * W) * 4));
#pragma GCC unroll 4
        for (int s = 0; s < kSteps; ++s) {
          const vi code = pairs<Bits>(words, s);
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
      const vf scale = load_as<Type::f16>(keys + part.scales, at);
#pragma GCC unroll 4
      for (int j = 0; j < Q; ++j) {
        const vi whole = kApart == 1 ? acc[j][v][0] : add_words(acc[j][v][0], acc[j][v][kApart - 1]);
        total[j][v] = fma(to_float(whole), scale, total[j][v]);
        if (Bits == 4) total[j][v] = fma(load_as<Type::f16>(keys + part.offsets, at), set1(q[j].sums[g]), total[j][v]);
      }
    }
  }
  for (int j = 0; j < Q; ++j) {
    for (int v = 0; v < V; ++v) store(scores + j * ld + v * W, mul(total[j][v], set1(q[j].scale)));
  }
}

// Rounded weights of a group's values for one query: pairs, their unit, -128 times their sum as a dword, and the sum of the entries'
// offsets.
struct Weights {
  float* pairs;
  float unit;
  float bias;
  float offset;
};

inline void round_weights(const float* scores, const char* scales, const char* offsets, int64_t begin, int64_t end,
                          float* added, Weights& weights) {
  vf largest = set1(1e-30f), total = zero(), shifted = zero();
  for (int64_t p = begin; p < end; p += W) {
    const vf weight = load(scores + p), here = where_above(weight, 0.0f, mul(weight, load_as<Type::f16>(scales, p)));
    store(added + p, here);
    largest = max(largest, here);
    total = add(total, here);
    if (offsets != nullptr) shifted = add(shifted, where_above(weight, 0.0f, mul(weight, load_as<Type::f16>(offsets, p))));
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
  weights.bias = whole_word(-128.0f * sum(to_float(all)));
  weights.offset = sum(shifted);
}

// acc of each query at [at, ...) of V vectors of a group's dwords, `across` to a row of four entries, from the i-th on: all entries
// [begin, end).
template <int Bits, int Q, int V>
[[gnu::noinline]] void weigh_codes(const char* codes, int64_t across, int64_t i, int64_t begin, int64_t end, const Weights (&weights)[Q],
                                   const Softmax* states, int64_t at, Requests<3>& requests, int64_t bytes) {
  constexpr int H = 8 / Bits;  // numbers of a byte
  // Separate sums shorten the chain of additions where one instruction multiplies and adds: rows at once, and sums of a number.
  constexpr int R = W == 16 && Q * V * H < 4 ? 2 : 1, kSums = W == 16 ? 2 * R : 1;
  const int64_t here = across - i < W ? across - i : W;
  Requests<3> ask = requests;
  vi acc[Q][V][H][kSums];
#pragma GCC unroll 4
  for (int j = 0; j < Q; ++j) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
#pragma GCC unroll 2
      for (int h = 0; h < H; ++h) {
#pragma GCC unroll 4
        for (int r = 0; r < kSums; ++r) acc[j][v][h][r] = Bits == 8 && r == 0 ? set1_word(&weights[j].bias) : vi{};
      }
    }
  }
  const char* row = codes + (begin / 4 * across + i) * 4;
  for (int64_t p = begin; p < end; p += 4 * R, row += across * 4 * R) {
    ask.some(bytes * R);
#pragma GCC unroll 4
    for (int part = 0; part < V * R; ++part) {
      const int v = part % V, r = part / V;
      const auto* from = reinterpret_cast<const uint32_t*>(row) + r * across + v * W;
      const vi words = here == W || W < 16 ? load_words(from) : load_first_words(from, here);  // parts of groups have 8 at least
#pragma GCC unroll 4
      for (int step = 0; step < 2 * H; ++step) {
        const vi code = pairs<Bits>(words, step);
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
        vf out = mul(to_float(whole), set1(weights[j].unit));
        if (Bits == 4) out = add(out, set1(weights[j].offset));
        store_first(states[j].acc + at + i + v * W + h * across, out, here);
      }
    }
  }
}

template <int Bits, int Q>
inline void weigh_packed(const char* values, const Packing& packing, int64_t dim, int64_t begin, int64_t end, const float* scores,
                         Softmax* states, float* room, Requests<3>& requests, int64_t bytes) {
  constexpr int V = Bits == 8 ? (W == 16 ? (Q < 4 ? 2 : 1) : kTileVectors) : (W == 4 ? 2 : 1);
  Weights weights[Q];
  for (int j = 0; j < Q; ++j, room += kAttendChunk / 2) weights[j].pairs = room;
  const PackedPart part(packing, dim);
  for (int64_t d = 0, g = 0; d < dim; d += packing.group, ++g) {
    const int64_t size = dim - d < packing.group ? dim - d : packing.group, across = Bits == 8 ? size : size / 2;
    const char* scales = values + part.scales + g * kAttendChunk * 2;
    const char* offsets = Bits == 8 ? nullptr : values + part.offsets + g * kAttendChunk * 2;
    for (int j = 0; j < Q; ++j) round_weights(scores + j * kAttendChunk, scales, offsets, begin, end, room, weights[j]);
    const char* codes = values + part.codes + kAttendChunk * d * Bits / 8;
    int64_t i = 0;
    for (; i + V * W <= across; i += V * W) weigh_codes<Bits, Q, V>(codes, across, i, begin, end, weights, states, d, requests, bytes);
    for (; i < across; i += W) weigh_codes<Bits, Q, 1>(codes, across, i, begin, end, weights, states, d, requests, bytes);
  }
}

template <int K, int Q>
inline void attend_packed_of(const Chunk& chunk, const Packings& packings, int64_t dim, const float* const* q, ScoreRule rule,
                             float* scores, Softmax* states) {
  constexpr int64_t ld = kAttendChunk;
  const PackedPart keys(packings.keys, dim);
  const int64_t groups = packings.keys.groups(dim);
  Requests<3> own{chunk.own, {}}, next{chunk.next[0], chunk.next[1]};
  own.rest();
  PackedQuery query[Q];
  float* room = scores + Q * ld;
  for (int j = 0; j < Q; ++j) {
    query[j] = {room, room + dim / 2, room + dim / 2 + groups, 0};
    round_query<K>(q[j], dim, packings.keys, query[j]);
    room += dim / 2 + 2 * groups;
  }
  const int64_t begin = chunk.first / kTile * kTile, end = (chunk.first + chunk.n + kTile - 1) / kTile * kTile;
  const int64_t bytes = next.share((end - begin) / kTile * 2);
  for (int64_t p = begin; p < end; p += kTile) {
    next.some(bytes);
    score_tile<K, Q>(chunk.keys, keys, packings.keys, dim, query, p, scores + p, ld);
  }
  const int64_t lo = chunk.first - begin;
  softmax_rows(scores + begin, ld, Q, end - begin, lo, lo + chunk.n, rule, states);
  const int64_t part = next.share((end - begin) / 4 * packings.values.groups(dim));
  (packings.values.bits == 8 ? weigh_packed<8, Q> : weigh_packed<4, Q>)(chunk.values, packings.values, dim, begin, end, scores, states,
                                                                         room, next, part);
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
  return attend_packed_keys<4>(chunk, packings, dim, q, queries, rule, scores, states);
}

}  // namespace headrace::HEADRACE_ISA
