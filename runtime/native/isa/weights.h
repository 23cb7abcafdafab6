// Readers of the weight formats, block by block, as vectors of floats.
//
// Values come in the format's own "prepared order". A format has these members:
//
//   all formats
//     kBits           bits of a value; 0: plain numbers; Planes: those of the low plane
//     kBlock          values of a block, kSteps * W
//     kSteps          vectors of a block
//     kStreamed       activation rows, at most, that take weights from their stream; for more they are unpacked in the L1 (floats.cpp)
//     Raw, load       the raw bits of a block; load_last: of a row's last block, which has fewer values
//     value           vector `i` of a part as floats q; a weight is fma(q, scale, offset), with these as `adapt` leaves them
//     source          index in its block of the value at a lane of a vector, for activations in the same order
//   quantized formats: all but Plain
//     kAffine         whether offsets are stored
//     kTogether       vectors that one part gives
//     part            the bits that kTogether vectors from `step` on are taken from
//     adapt           changes a stored scale and offset to those that `value` needs
//     spread          picks each lane's scale out of W of them; OneScale where lanes of a block share theirs
//   rounding formats, those of with_words, for products of integers (rounded.h)
//     kMaySymmetric   whether weights may come without offsets: as Matrix::may_be_symmetric()
//     kSymmetric      whether they do
//     kFloatScales    whether scales of symmetric weights may be float32, likewise
//     kLargest        of the integers that take and take_four give
//     kPlaned, kLow   whether high bits have dwords of their own (core/interleaved.h), and dwords of low bits that share one
//     take            pair `step` of the values in every dword, in 16 bits each; Planes: with the dword of high bits
//     take_four       four, in 8 bits each; not of planes
//     number          the value at a bit of every dword as a float, for outliers; not of planes
//     fit             changes a stored scale and offset to those of the integers of take
//
// A new format needs a case in with_words or with_format below, in read_row (core/embed.cpp), and in tests/weights.h.
// Guards: runtime/native/tests/projections.cpp and tests/runtime/ops/test_native_kernels.py, which try every format.
#pragma once

#include <type_traits>

#include "simd.h"

namespace headrace::HEADRACE_ISA {

// 2, 4 and 8 bits: W dwords at a time; step s takes the s-th value out of every dword.
template <int Bits>
struct Words {
  static constexpr bool kAffine = true, kPlaned = false;
  static constexpr int kLow = 1;  // dwords that share one of high bits, if planed
  static constexpr bool kMaySymmetric = Bits > 2, kSymmetric = false;
  static constexpr bool kFloatScales = false;  // whether scales of symmetric weights may be float32
  static constexpr int kBits = Bits;
  static constexpr int kLargest = (1 << Bits) - 1;  // of the integers that take and take_four give
  static constexpr int kSteps = 32 / Bits;
  static constexpr int kBlock = W * kSteps;
  static constexpr int kTogether = kSteps;
  static constexpr int kStreamed = 1;
  using Raw = vi;

  static Raw load(const uint8_t* row, int64_t block) {
    return load_words(reinterpret_cast<const uint32_t*>(row) + block * W);
  }
  static Raw load_last(const uint8_t* row, int64_t block, int64_t values) {
    return load_first_words(reinterpret_cast<const uint32_t*>(row) + block * W, values / kSteps);
  }
  static Raw part(Raw raw, int) { return raw; }
  static vf value(Raw raw, int i) { return quant<Bits>(raw, i); }
  static void adapt(vf& scale, vf& offset) { decode<Bits>(scale, offset); }
  static vi take(vi words, int step) { return pairs<Bits>(words, step); }
  static vi take_four(vi words, int step) { return quads<Bits>(words, step); }
  static vf number(vi words, const float* bit) { return lowest<Bits>(shift_right_by(words, bit)); }
  static void fit(vf&, vf&) {}
  static int64_t source(int step, int lane) { return lane * kSteps + step; }
  static Spread spread(int64_t group_shift) { return Spread(static_cast<int>(group_shift) - __builtin_ctz(kSteps)); }
};

// 5 and 6 bits in planes (core/interleaved.h): a dword of lower bits meets the same activations as one of 4-bit weights.
template <int Bits>
struct Planes : Words<4> {
  static constexpr bool kPlaned = true;
  static constexpr bool kFloatScales = Bits == 6;  // as those of Q6_K are
  static constexpr int kHigh = Bits - 4;  // bits of a weight in the high plane
  static constexpr int kLow = 4 / kHigh;
  static constexpr int kLargest = (1 << Bits) - 1;

  // number: of the dword `low` among those that share `high`; 0, too, if its high bits were shifted to the lowest ones of each byte. Taken
  // four at a time, for two steps.
  static vi take(vi low, vi high, int step, int number = 0) {
    return pairs<8>(join_planes<kHigh>(low, high, step % 2, 2 * number + step % 2), step / 2);
  }
};

// Integers without offsets, see Matrix.
template <class F>
struct Symmetric : F {
  static constexpr bool kAffine = false, kSymmetric = true;
};

// E2M1 floats, laid out like 4-bit numbers. Twice their value, plus 12, is a whole number from 0 to 24.
struct Fp4 : Words<4> {
  static constexpr int kLargest = 24;
  static constexpr bool kAffine = false, kMaySymmetric = false;
  static vf value(Raw raw, int i) { return fp4(raw, i); }
  static void adapt(vf&, vf&) {}
  // Looked up four at a time, for two steps.
  static vi take(vi words, int step) { return pairs<8>(fp4_quads(shift_right(words, 4 * (step % 2))), step / 2); }
  static vi take_four(vi words, int step) { return fp4_quads(shift_right(words, 4 * step)); }
  static vf number(vi words, const float* bit) { return lowest<8>(fp4_quads(shift_right_by(words, bit))); }
  static void fit(vf& scale, vf& offset) {
    offset = mul(scale, set1(-6.0f));
    scale = mul(scale, set1(0.5f));
  }
};

// E4M3 floats, laid out like 8-bit numbers.
struct Fp8 : Words<8> {
  static constexpr bool kAffine = false;
  static constexpr int kStreamed = W == 4 ? 1 : 4;
  static vf value(Raw raw, int i) { return fp8(raw, i); }
  static void adapt(vf&, vf&) {}
};

// A scale for all lanes of a block, as Spread gives one for each.
struct OneScale {
  vf pick(const float* scales, int64_t from) const { return set1(scales[from]); }
};

// 3 and, for float products, 5 and 6 bits: 32 values at a time, or 16 in groups of 16 (a whole number of bytes, never across groups), in
// their own order.
template <int Bits, int Block = 32>
struct Stream {
  static constexpr bool kAffine = true;
  static constexpr int kBits = Bits;
  static constexpr int kSteps = Block / W;
  static constexpr int kBlock = Block;
  static constexpr int kTogether = W == 4 || kSteps == 1 ? 1 : 2;
  static constexpr int kStreamed = W == 4 ? 1 : 4;
  using Raw = const uint8_t*;

  static Raw load(const uint8_t* row, int64_t block) { return row + block * (Block * Bits / 8); }
  static Raw load_last(const uint8_t* row, int64_t block, int64_t) { return load(row, block); }
  static auto part(Raw raw, int step) { return unpack<Bits, Block>(raw, step); }
  template <class Part>
  static vf value(Part part, int i) { return unpacked<Bits>(part, i); }
  static void adapt(vf&, vf&) {}
  static int64_t source(int step, int lane) { return step * W + lane; }
  static OneScale spread(int64_t) { return {}; }
};

// Plain numbers.
template <Type T>
struct Plain {
  static constexpr int kBits = 0;
  static constexpr int kSteps = 1;
  static constexpr int kBlock = W;
  static constexpr int kStreamed = W == 4 ? 1 : 4;
  using Raw = vf;

  static Raw load(const uint8_t* row, int64_t block) { return load_as<T>(row, block * W); }
  static Raw load_last(const uint8_t* row, int64_t block, int64_t values) {
    return load_first_as<T>(row, block * W, values);
  }
  static vf value(Raw raw, int) { return raw; }
  static int64_t source(int, int lane) { return lane; }
};

// Calls body(Format{}) with the format of a matrix that rounds().
template <class Body>
inline auto with_words(const Matrix& w, Body&& body) {
  if (w.code == Code::fp4) return body(Fp4{});
  switch (w.bits) {
    case 2: return body(Words<2>{});
    case 4: return body(Words<4>{});
    case 5: return body(Planes<5>{});
    case 6: return body(Planes<6>{});
    default: return body(Words<8>{});
  }
}

// The same, or Symmetric<Format>{} for a matrix without offsets.
template <class Body>
inline void with_integers(const Matrix& w, Body&& body) {
  with_words(w, [&](auto format) {
    if constexpr (decltype(format)::kMaySymmetric) {
      if (w.symmetric()) return body(Symmetric<decltype(format)>{});
    }
    body(format);
  });
}

// Calls body(Format{}) with the format a matrix is stored in.
template <class Body>
inline auto with_format(const Matrix& w, Body&& body) {
  if (w.code == Code::fp4) return body(Fp4{});
  if (w.code == Code::fp8) return body(Fp8{});
  switch (w.bits) {
    case 2: return body(Words<2>{});
    case 3: return body(Stream<3>{});
    case 4: return body(Words<4>{});
    case 5: return body(Stream<5>{});
    case 6: return w.group == 16 ? body(Stream<6, 16>{}) : body(Stream<6>{});
    case 8: return body(Words<8>{});
    default: break;
  }
  if (w.type == Type::f16) return body(Plain<Type::f16>{});
  if (w.type == Type::bf16) return body(Plain<Type::bf16>{});
  return body(Plain<Type::f32>{});
}

// Calls body(std::integral_constant<Type, T>{}) with the type of a quantized matrix's scales.
template <class F, class Body>
[[gnu::always_inline]] inline auto with_scales(const Matrix& w, Body&& body) {
  if constexpr (F::kAffine) {
    if (w.type == Type::f16) return body(std::integral_constant<Type, Type::f16>{});
    if (w.type == Type::bf16) return body(std::integral_constant<Type, Type::bf16>{});
    return body(std::integral_constant<Type, Type::f32>{});
  } else if constexpr (F::kSymmetric) {
    if (w.type == Type::f16) return body(std::integral_constant<Type, Type::f16>{});
    if constexpr (F::kFloatScales) {
      if (w.type == Type::f32) return body(std::integral_constant<Type, Type::f32>{});
    }
    return body(std::integral_constant<Type, Type::bf16>{});
  } else {
    if (w.type == Type::e4m3) return body(std::integral_constant<Type, Type::e4m3>{});
    return body(std::integral_constant<Type, Type::e8m0>{});
  }
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

// Layout of a quantized matrix's groups in blocks. Empty for plain rows.
template <class F, bool Quantized = F::kBits != 0>
struct Groups {
  explicit Groups(const Matrix&) {}
};

template <class F>
struct Groups<F, true> {
  int64_t count;   // in a row
  int64_t shift;   // log2(values in a group)
  decltype(F::spread(0)) spread;

  explicit Groups(const Matrix& w)
      : count(w.groups()), shift(__builtin_ctzll(static_cast<uint64_t>(w.group))), spread(F::spread(shift)) {}

  // Number of groups from `first` on, at most W.
  int64_t batch(int64_t first) const { return count - first < W ? count - first : W; }
  // The first of W groups that have those from `first` on, in the row unless it has fewer: a whole vector is loaded faster than a part.
  // Of 20 groups and W = 8 the last four, from 16 on, come with 12 to 15 before them: base(16) is 12, and group 16 is in lane 4.
  // Where lanes have scales of their own, those beyond the row's end take zeros, so that `first` is the first: base(16) is 16.
  int64_t base(int64_t first) const {
    constexpr bool kShared = std::is_same_v<decltype(spread), OneScale>;
    return kShared && count >= W && count - first < W ? count - W : first;
  }
  // Index of block b's first scale in a batch.
  int64_t scale_at(int64_t b, int64_t first) const { return ((b * F::kBlock) >> shift) - first; }
};

}  // namespace headrace::HEADRACE_ISA
