// Rows of a matrix as floats in its format's order, always dequantized as fma(q, scale, offset).
#pragma once

#include "weights.h"

namespace headrace::HEADRACE_ISA {

// Prefetch distance of each stream of weights and scales, in bytes. Rows are short (288 bytes at K = 576, 4 bits) and a round has a
// dozen streams, too many for the hardware prefetcher. A step reads a weight once, so weights bypass the outer caches.
constexpr int64_t kWeightsAhead = 1536;
constexpr int64_t kScalesAhead = 256;

// R rows, `apart` from each other, taken side by side. kAhead: each is read once, in order, so prefetch them.
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

  // use(b, step, vectors) for every vector of the values [begin, end); begin where a block and a group begin.
  template <class Use>
  [[gnu::always_inline]] inline void walk(int64_t begin, int64_t end, Use&& use) const {
    if constexpr (F::kBits == 0) {
      int64_t b = begin / W;
      vf v[R];
      for (; (b + 1) * W <= end; ++b) {
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) v[r] = F::load(data + r * stride, b);
        use(b, 0, v);
      }
      if (b * W < end) {
        for (int r = 0; r < R; ++r) v[r] = F::load_last(data + r * stride, b, end - b * W);
        use(b, 0, v);
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
    for (int64_t g = begin >> groups.shift; g << groups.shift < end; g += W) {
      const int64_t n = groups.batch(g);
      vf scales[R], offsets[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const int64_t at = (row + r * apart) * groups.count + g;
        if constexpr (kAhead) __builtin_prefetch(static_cast<const uint8_t*>(w.scales) + at * size_of(T) + kScalesAhead);
        scales[r] = n == W ? load_as<T>(w.scales, at) : load_first_as<T>(w.scales, at, n);
        offsets[r] = zero();
        if constexpr (F::kAffine) {
          if constexpr (kAhead) __builtin_prefetch(static_cast<const uint8_t*>(w.offsets) + at * size_of(T) + kScalesAhead);
          offsets[r] = n == W ? load_as<T>(w.offsets, at) : load_first_as<T>(w.offsets, at, n);
        }
        F::adapt(scales[r], offsets[r]);
      }
      const int64_t batch_end = (g + n) << groups.shift;
      const int64_t stop = batch_end < end ? batch_end : end;
      int64_t b = (g << groups.shift) / F::kBlock;
      const auto block = [&](auto load_raw) __attribute__((always_inline)) {
        const int64_t scale_at = groups.scale_at(b, g);
        typename F::Raw raw[R];
        vf s[R], o[R], v[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          raw[r] = load_raw(data + r * stride);
          if constexpr (kAhead) {
            __builtin_prefetch(data + r * stride + b * F::kBlock * F::kBits / 8 + kWeightsAhead, 0, 0);
          }
          s[r] = groups.spread.pick(scales[r], scale_at);
          o[r] = groups.spread.pick(offsets[r], scale_at);
        }
#pragma GCC unroll 16
        for (int step = 0; step < F::kSteps; ++step) {
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) v[r] = fma(F::value(raw[r], step), s[r], o[r]);
          use(b, step, v);
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

// Values [begin, end) of a row, as whole vectors.
template <class F>
inline void unpack_row(const Matrix& w, const Groups<F>& groups, int64_t row, int64_t begin, int64_t end, float* out) {
  const int64_t first = begin / F::kBlock;
  RowReader<F, 1>(w, groups, row, 0).walk(begin, end, [&](int64_t b, int step, const vf(&v)[1]) __attribute__((always_inline)) {
    store(out + ((b - first) * F::kSteps + step) * W, v[0]);
  });
}

}  // namespace headrace::HEADRACE_ISA
