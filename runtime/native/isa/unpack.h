// Rows of a matrix as floats in its format's order, always dequantized as fma(q, scale, offset).
//
// For floats.cpp and gemm.h. Guard: runtime/native/tests/projections.cpp (every format that is multiplied in floats).
#pragma once

#include "weights.h"

namespace headrace::HEADRACE_ISA {

// Prefetch distance of each stream of weights and scales, in bytes. Rows are short (288 bytes at K = 576, 4 bits) and a round has a
// dozen streams, too many for the hardware prefetcher. A step reads a weight once, so weights bypass the outer caches.
constexpr int64_t kWeightsAhead = 1536;
constexpr int64_t kScalesAhead = 256;

// Rows whose vectors are made in turns, so that none waits for another's; where registers are few, row by row.
constexpr int kSideBySide = W == 16 ? 4 : 1;

// R rows of w, row, row + apart, ..., taken side by side. kAhead: each is read once, in order, so prefetch them. `data`: bytes of the first
// row; `stride`: bytes from a row to the next of the R.
template <class F, int R, bool kAhead = false>
struct RowReader {
  const Matrix& w;
  const Groups<F>& groups;
  const uint8_t* data;
  int64_t row, apart, stride;

  RowReader(const Matrix& matrix, const Groups<F>& its_groups, int64_t first_row, int64_t distance)
      : w(matrix),
        groups(its_groups),
        data(row_data(matrix, first_row)),
        row(first_row),
        apart(distance),
        stride(matrix.row_bytes() * distance) {}

  // use(b, step, r, vector) for every vector of the values [begin, end) of row r: vector `step` of block b. begin: where a block and a
  // group begin. Behind `end` a last, partial block has meaningless numbers, which meet zeros of prepared activations (prepare.h).
  template <class Use>
  [[gnu::always_inline]] inline void walk(int64_t begin, int64_t end, Use&& use) const {
    if constexpr (F::kBits == 0) {
      int64_t b = begin / W;
      for (; (b + 1) * W <= end; ++b) {
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) use(b, 0, r, F::load(data + r * stride, b));
      }
      if (b * W < end) {
        for (int r = 0; r < R; ++r) use(b, 0, r, F::load_last(data + r * stride, b, end - b * W));
      }
    } else {
      with_scales<F>(w, [&](auto type) __attribute__((always_inline)) {
        walk_groups<decltype(type)::value>(begin, end, use);
      });
    }
  }

 private:
  template <Type T, class Use>
  [[gnu::always_inline]] inline void walk_groups(int64_t begin, int64_t end, Use&& use) const {
    constexpr int S = R < kSideBySide ? R : kSideBySide;
    for (int64_t g = begin >> groups.shift; g << groups.shift < end; g += W) {
      const int64_t n = groups.batch(g), base = groups.base(g);
      const int64_t batch_end = (g + n) << groups.shift;
      const int64_t stop = batch_end < end ? batch_end : end;
      const bool whole = n == W || base != g;
      alignas(64) float scales[R][W], offsets[R][W];  // in memory, from where one is broadcast in its load
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const int64_t at = (row + r * apart) * groups.count + base;
        if constexpr (kAhead) {
          __builtin_prefetch(static_cast<const uint8_t*>(w.scales) + at * size_of(T) + kScalesAhead);
          const uint8_t* ahead = data + r * stride + kWeightsAhead;
          for (int64_t i = (g << groups.shift) * F::kBits / 8; i < stop * F::kBits / 8; i += 64) __builtin_prefetch(ahead + i, 0, 0);
        }
        vf scale = whole ? load_as<T>(w.scales, at) : load_first_as<T>(w.scales, at, n);
        vf offset = zero();
        if constexpr (F::kAffine) {
          if constexpr (kAhead) __builtin_prefetch(static_cast<const uint8_t*>(w.offsets) + at * size_of(T) + kScalesAhead);
          offset = whole ? load_as<T>(w.offsets, at) : load_first_as<T>(w.offsets, at, n);
        }
        F::adapt(scale, offset);
        store(scales[r], scale);
        store(offsets[r], offset);
      }
      int64_t b = (g << groups.shift) / F::kBlock;
      const auto block = [&](auto load_raw) __attribute__((always_inline)) {
        const int64_t scale_at = groups.scale_at(b, base);
#pragma GCC unroll 4
        for (int first = 0; first < R; first += S) {
          typename F::Raw raw[S];
          vf s[S], o[S];
#pragma GCC unroll 4
          for (int r = 0; r < S; ++r) {
            raw[r] = load_raw(data + (first + r) * stride);
            s[r] = groups.spread.pick(scales[first + r], scale_at);
            o[r] = groups.spread.pick(offsets[first + r], scale_at);
          }
#pragma GCC unroll 8
          for (int step = 0; step < F::kSteps; step += F::kTogether) {
            decltype(F::part(raw[0], 0)) part[S];
#pragma GCC unroll 4
            for (int r = 0; r < S; ++r) part[r] = F::part(raw[r], step);
#pragma GCC unroll 16
            for (int i = 0; i < F::kTogether; ++i) {
              vf v[S];
#pragma GCC unroll 4
              for (int r = 0; r < S; ++r) v[r] = F::value(part[r], i);
#pragma GCC unroll 4
              for (int r = 0; r < S; ++r) v[r] = fma(v[r], s[r], o[r]);
#pragma GCC unroll 4
              for (int r = 0; r < S; ++r) use(b, step + i, first + r, v[r]);
            }
          }
        }
      };
      for (; (b + 1) * F::kBlock <= stop; ++b) {
        block([&](const uint8_t* p) __attribute__((always_inline)) { return F::load(p, b); });
      }
      if (b * F::kBlock < stop) {
        block([&](const uint8_t* p) __attribute__((always_inline)) {
          return F::load_last(p, b, stop - b * F::kBlock);
        });
      }
    }
  }
};

// out: values [begin, end) of a row in the format's order, as whole vectors of whole blocks.
template <class F>
inline void unpack_row(const Matrix& w, const Groups<F>& groups, int64_t row, int64_t begin, int64_t end, float* out) {
  const int64_t first = begin / F::kBlock;
  RowReader<F, 1>(w, groups, row, 0).walk(begin, end, [&](int64_t b, int step, int, vf v) __attribute__((always_inline)) {
    store(out + ((b - first) * F::kSteps + step) * W, v);
  });
}

}  // namespace headrace::HEADRACE_ISA
