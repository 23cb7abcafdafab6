// How each storage format of weights is read, block by block, as vectors of floats.
//
// A format names: kBlock, the values in a block; kSteps, the vectors they come out as; load, the block's raw
// bits (load_last where the row ends inside it); value, vector `step` of them, not yet scaled. The order in which values
// come out is the format's own ("prepared order"); `source` tells which value of the row it is.
#pragma once

#include "simd.h"

namespace headrace::HEADRACE_ISA {

// 2, 4 and 8 bits: W dwords at a time; step s takes the s-th value out of every dword.
template <int Bits>
struct Words {
  static constexpr int kBits = Bits;
  static constexpr int kSteps = 32 / Bits;
  static constexpr int kBlock = W * kSteps;
  using Raw = vi;

  static Raw load(const uint8_t* row, int64_t block) {
    return load_words(reinterpret_cast<const uint32_t*>(row) + block * W);
  }
  static Raw load_last(const uint8_t* row, int64_t block, int64_t values) {
    return load_first_words(reinterpret_cast<const uint32_t*>(row) + block * W, values / kSteps);
  }
  static vf value(Raw raw, int step) { return quant<Bits>(raw, step); }
  static int64_t source(int step, int lane) { return lane * kSteps + step; }
  static Spread spread(int64_t group) { return Spread(group / kSteps); }
};

// 3, 5 and 6 bits: 32 values at a time (a whole number of bytes, never across groups), in their own order.
template <int Bits>
struct Stream {
  static constexpr int kBits = Bits;
  static constexpr int kSteps = 32 / W;
  static constexpr int kBlock = 32;
  using Raw = const uint8_t*;

  static Raw load(const uint8_t* row, int64_t block) { return row + block * (4 * Bits); }
  static Raw load_last(const uint8_t* row, int64_t block, int64_t) { return load(row, block); }
  static vf value(Raw raw, int step) {
    if constexpr (W >= 8) {
      return unpack<Bits>(raw + step * (W * Bits / 8));
    } else {
      return unpack4<Bits>(raw, step * (W * Bits));
    }
  }
  static int64_t source(int step, int lane) { return step * W + lane; }
  static Spread spread(int64_t) { return Spread(W); }
};

// Plain numbers.
template <Type T>
struct Plain {
  static constexpr int kBits = 0;
  static constexpr int kSteps = 1;
  static constexpr int kBlock = W;
  using Raw = vf;

  static Raw load(const uint8_t* row, int64_t block) { return load_as<T>(row, block * W); }
  static Raw load_last(const uint8_t* row, int64_t block, int64_t values) {
    return load_first_as<T>(row, block * W, values);
  }
  static vf value(Raw raw, int) { return raw; }
  static int64_t source(int, int lane) { return lane; }
};

// Calls body(Format{}) with the format a matrix is stored in.
template <class Body>
inline auto with_format(const Matrix& w, Body&& body) {
  switch (w.bits) {
    case 2: return body(Words<2>{});
    case 3: return body(Stream<3>{});
    case 4: return body(Words<4>{});
    case 5: return body(Stream<5>{});
    case 6: return body(Stream<6>{});
    case 8: return body(Words<8>{});
    default: break;
  }
  if (w.type == Type::f16) return body(Plain<Type::f16>{});
  if (w.type == Type::bf16) return body(Plain<Type::bf16>{});
  return body(Plain<Type::f32>{});
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

template <class F>
inline int64_t padded_depth(const Matrix& w) {
  return round_up(w.k, F::kBlock > 16 ? F::kBlock : 16);
}

inline const uint8_t* row_data(const Matrix& w, int64_t row) {
  return static_cast<const uint8_t*>(w.data) + row * w.row_bytes();
}

// Walks the groups of a row W at a time, the blocks within, and tells which scale a block starts at.
struct GroupWalk {
  int64_t groups;
  int64_t group_shift;  // log2(group)

  explicit GroupWalk(const Matrix& w) : groups(w.groups()), group_shift(__builtin_ctzll(static_cast<uint64_t>(w.group))) {}
  int64_t in_batch(int64_t first) const { return groups - first < W ? groups - first : W; }
};

}  // namespace headrace::HEADRACE_ISA
