// Queries, keys and values as 16-bit integers, in the layouts of QueryRows and EntryBlock (core/kernels.h).
//
// - A query gets a length of at most 65000 and a key one of less than 32768, the key by a power of two: by Cauchy-Schwarz
//   no sum of products reaches 2^31 for any head size. Numbers of at least a sixteenth of an f16 key's length stay exact.
// - Values get 13 bits, each entry by a power of two of its own. In f16, numbers of at least a quarter of the entry's
//   largest stay exact. 13 bits times the weights of attend_rounded.h stay below 2^31.
//
// Not finite: NaN in a query or key, and an infinite squared length of a key, make its scale NaN; a value makes the shares
// of its block NaN. An infinite query has the factor 0 and an infinite scale: its scores are infinite or NaN.
//
// Guard: runtime/native/tests/attention.cpp, with the error bounds of attention_bounds.h.
#pragma once

#include "rounded.h"

namespace headrace::HEADRACE_ISA {

constexpr int kRowVectors = W == 16 ? 3 : 2;  // of queries per entry
constexpr int64_t kRoundedRows = kRowVectors * W;
constexpr float kQueryLength = 65000.0f;
constexpr float kLargest = 32767.0f;
// Exponent of entries whose numbers are smaller or zero: 2^60, and 2^(12 + 60) times their numbers, are finite in float32.
constexpr int kSmallestValue = -60;
static_assert(kRoundedRows <= kMaxRoundedRows && kRoundedEntries % W == 0);

inline int exponent_of(float x) { return static_cast<int>(__builtin_bit_cast(uint32_t, x) >> 23 & 255) - 127; }
inline float power_of_two(int exponent) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(exponent + 127) << 23);
}
inline bool finite(float x) { return x - x == 0; }

// Numbers [i, i + W) of a row paired with those half a row further on.
template <Type T>
inline vi round_pairs(const void* row, int64_t at, int64_t dim, int64_t i, vf factor) {
  const int64_t n = dim / 2 - i < W ? dim / 2 - i : W;
  if (n == W) return join_pairs(mul(load_as<T>(row, at + i), factor), mul(load_as<T>(row, at + dim / 2 + i), factor));
  return join_pairs(mul(load_first_as<T>(row, at + i, n), factor),
                    mul(load_first_as<T>(row, at + dim / 2 + i, n), factor));
}

template <Type T>
inline vf squares_of(const void* row, int64_t at, int64_t dim) {
  vf squares = zero();
  for (int64_t d = 0; d < dim; d += W) {  // W divides 16, and 16 divides dim
    const vf v = load_as<T>(row, at + d);
    squares = fma(v, v, squares);
  }
  return squares;
}

// Prefetch one entry's row, a block past `entry`.
template <Type T>
inline void request_block(const void* rows, int64_t entry, int64_t dim) {
  const char* row = static_cast<const char*>(rows) + (entry + kRoundedEntries) * dim * size_of(T);
  for (int64_t byte = 0; byte < dim * size_of(T); byte += 64) request(row + byte);
}

// Scale of a query to its length limit, or of its largest number to 16 bits. 1e-15, and its square below the root, keep it finite
// for a query of zeros.
inline float query_factor(const float* q, int64_t dim) {
  vf top = set1(1e-15f);
  for (int64_t d = 0; d < dim; d += W) top = max(top, max(load(q + d), sub(zero(), load(q + d))));
  const float by_length = kQueryLength / __builtin_sqrtf(sum(squares_of<Type::f32>(q, 0, dim)) + 1e-30f);
  const float by_largest = kLargest / maximum(top);
  return by_largest < by_length ? by_largest : by_length;  // in the order that keeps NaN
}

// Up to kRoundedRows queries (the others become zeros), interleaved: word j of all of them side by side.
inline void round_queries(const float* const* q, int64_t count, int64_t dim, float factor, const QueryRows& rows) {
  for (int64_t first = 0; first < kRoundedRows; first += W) {
    float factors[W];
    for (int r = 0; r < W; ++r) {
      factors[r] = first + r < count ? query_factor(q[first + r], dim) : 1.0f;
      rows.scales[first + r] = factor / factors[r];
    }
    store(rows.top + first, set1(kLowest));
    store(rows.sum + first, zero());
    for (int64_t i = 0; i < dim / 2; i += W) {
      vf square[W];
      for (int r = 0; r < W; ++r) {
        square[r] = zero();
        if (first + r < count) square[r] = (vf)round_pairs<Type::f32>(q[first + r], 0, dim, i, set1(factors[r]));
      }
      transpose(square);
      for (int j = 0; j < W && i + j < dim / 2; ++j) store(rows.words + (i + j) * kRoundedRows + first, square[j]);
    }
  }
  for (int64_t i = 0; i < dim * kRoundedRows; i += W) store(rows.acc + i, zero());
}

// keys (entries, D / 2 padded to W) and key_scales of entries [begin, begin + n), by W entries.
template <Type T>
inline void round_keys(const HeadCache& kv, int64_t begin, int64_t n, const EntryBlock& block) {
  const int64_t stride = round_up(kv.dim / 2, W);
  for (int64_t first = 0; first < kRoundedEntries; first += W) {
    vf squares[W];
    for (int i = 0; i < W; ++i) {
      request_block<T>(kv.keys, begin + first + i, kv.dim);
      squares[i] = first + i < n ? squares_of<T>(kv.keys, (begin + first + i) * kv.dim, kv.dim) : zero();
    }
    alignas(64) float lengths[W], factors[W];
    store(lengths, max(set1(1e-30f), sums(squares)));  // squared; of a key of zeros, both powers below are finite
    for (int i = 0; i < W; ++i) {
      const int exponent = exponent_of(lengths[i]) >> 1;  // of the root; the length becomes one from 2^14 to 2^15
      block.key_scales[first + i] = finite(lengths[i]) ? power_of_two(exponent - 14) : __builtin_nanf("");
      factors[i] = power_of_two(14 - exponent);
    }
    for (int i = 0; i < W; ++i) {
      const int64_t at = (begin + first + i) * kv.dim;
      float* to = block.keys + (first + i) * stride;
      for (int64_t d = 0; d < kv.dim / 2; d += W) {
        if (first + i < n) store_words(to + d, round_pairs<T>(kv.keys, at, kv.dim, d, set1(factors[i])));
        else store(to + d, zero());
      }
    }
  }
}

// values (entries / 2, D), pairs of two entries, with exponents and shares, of entries [begin, begin + n).
template <Type T>
inline void round_values_of(const HeadCache& kv, int64_t begin, int64_t n, const EntryBlock& block) {
  vf spoiled = zero();  // NaN if anything is not finite
  for (int64_t first = 0; first < kRoundedEntries; first += W) {
    vf top[W];
    for (int i = 0; i < W; ++i) {
      top[i] = zero();
      request_block<T>(kv.values, begin + first + i, kv.dim);
      for (int64_t d = 0; first + i < n && d < kv.dim; d += W) {
        const vf v = load_as<T>(kv.values, (begin + first + i) * kv.dim + d);
        top[i] = max(top[i], max(v, sub(zero(), v)));
        spoiled = fma(v, zero(), spoiled);
      }
    }
    alignas(64) float largest[W], factors[W];
    store(largest, maxima(top));
    for (int i = 0; i < W; ++i) {
      int exponent = exponent_of(largest[i]);
      if (exponent < kSmallestValue) exponent = kSmallestValue;
      block.value_exponents[first + i] = static_cast<float>(exponent);
      block.value_shares[first + i] = power_of_two(-exponent);
      factors[i] = power_of_two(12 - exponent);  // the largest becomes one from 2^12 to 2^13
    }
    for (int i = 0; i < W; i += 2) {
      const int64_t at = (begin + first + i) * kv.dim;
      float* to = block.values + (first + i) / 2 * kv.dim;
      for (int64_t d = 0; d < kv.dim; d += W) {
        const vf a = first + i < n ? mul(load_as<T>(kv.values, at + d), set1(factors[i])) : zero();
        const vf b = first + i + 1 < n ? mul(load_as<T>(kv.values, at + kv.dim + d), set1(factors[i + 1])) : zero();
        store_words(to + d, join_pairs(a, b));
      }
    }
  }
  const vf spoil = set1(sum(spoiled));
  for (int64_t i = 0; i < kRoundedEntries; i += W) {
    store(block.value_shares + i, add(load(block.value_shares + i), spoil));
  }
}

// Entries [begin, begin + n) of a cache; the block's others become zeros.
inline void round_entries(const HeadCache& kv, int64_t begin, int64_t n, const EntryBlock& block) {
  if (kv.type == Type::f32) {
    round_keys<Type::f32>(kv, begin, n, block);
    round_values_of<Type::f32>(kv, begin, n, block);
  } else if (kv.type == Type::f16) {
    round_keys<Type::f16>(kv, begin, n, block);
    round_values_of<Type::f16>(kv, begin, n, block);
  } else {
    round_keys<Type::bf16>(kv, begin, n, block);
    round_values_of<Type::bf16>(kv, begin, n, block);
  }
}

}  // namespace headrace::HEADRACE_ISA
