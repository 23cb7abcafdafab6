// Rounded activation rows times a matrix of 2-, 4- or 8-bit weights: decode, small batches and prefill alike.
//
// Weights are stored interleaved (core/interleaved.h): a lane belongs to a weight row, each word meets one pair of every activation
// row, and no sums across lanes are left. A band is read in one sweep through memory; with several activation rows it
// comes out of the cache for all but the first few.
#pragma once

#include <type_traits>

#include "rounded.h"

namespace headrace::HEADRACE_ISA {

// Bytes ahead of the arithmetic that weights and their scales are asked for: one row of activations is bound by how
// fast they arrive, and the processor's own prefetcher starts anew at every page. A step never comes back to a weight, so
// they are asked for past the outer caches.
constexpr int64_t kTurnedAhead = 4096;
constexpr int64_t kTurnedScalesAhead = 1024;

// Rows of activations that meet a word at once, at most, and the vectors of a band that registers allow beside them.
constexpr int kMostRows = kAccumulators / 2 < 8 ? kAccumulators / 2 : 8;
constexpr int band_vectors(int rows) {
  constexpr int kWhole = static_cast<int>(kBand) / W;
  return kAccumulators / rows < kWhole ? kAccumulators / rows : kWhole;
}

// out[m][lane + i] = w[band * kBand + lane + i] . x[m] for i < R * W. Rows of x are ldx apart. The sums are kept in memory, as
// registers hold the products of the group at hand; those in two parts where few rows would wait for one another's
// additions.
template <class F, Type T, int M, int R>
[[gnu::always_inline]] inline void meet_band(const Matrix& w, const float* x, int64_t ldx, int64_t band, int64_t lane,
                                             float (&out)[M][kBand]) {
  constexpr int kHalf = Rounded<F>::kHalf;
  constexpr int kChains = 4 * M * R <= kAccumulators ? 2 : 1;
  const int64_t group_words = w.group / F::kSteps, groups = w.groups();
  const auto* words = static_cast<const uint32_t*>(w.data) + band * (w.k / F::kSteps) * kBand + lane;
  const int64_t first_scale = band * groups * kBand + lane;
  const float* scales = x + Rounded<F>::scales_at(w);
  const float* sums = x + Rounded<F>::sums_at(w);
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) store(&out[m][lane + r * W], zero());
  }
  for (int64_t g = 0; g < groups; ++g) {
    vi dot[kChains][M][R] = {};
    for (int64_t i = 0; i < group_words; ++i, words += kBand, x += kHalf) {
      vi left[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        left[r] = load_words(words + r * W);
        if (r * W % 16 == 0) __builtin_prefetch(words + r * W + kTurnedAhead / 4, 0, 0);
      }
#pragma GCC unroll 8
      for (int s = 0; s < kHalf; ++s) {
        vi weights[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          weights[r] = pairs<F::kBits>(left[r], 0);
          left[r] = next_pairs<F::kBits>(left[r]);
        }
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
          const vi xs = set1_word(x + m * ldx + s);
          vi(&sum)[R] = dot[s % kChains][m];
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) sum[r] = dot_pairs(sum[r], weights[r], xs);
        }
      }
    }
    vf scale[R], offset[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const int64_t at = first_scale + g * kBand + r * W;
      scale[r] = load_as<T>(w.scales, at);
      offset[r] = load_as<T>(w.offsets, at);
      if (r == 0) {
        __builtin_prefetch(static_cast<const uint8_t*>(w.scales) + at * size_of(T) + kTurnedScalesAhead, 0, 0);
        __builtin_prefetch(static_cast<const uint8_t*>(w.offsets) + at * size_of(T) + kTurnedScalesAhead, 0, 0);
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const vf x_scale = set1(scales[m * ldx + g]), x_sum = set1(sums[m * ldx + g]);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        float* to = &out[m][lane + r * W];
        vi whole = dot[0][m][r];
        if constexpr (kChains == 2) whole = add_words(whole, dot[1][m][r]);
        const vf so_far = fma(offset[r], x_sum, load(to));
        store(to, fma(mul(scale[r], x_scale), to_float(whole), so_far));
      }
    }
  }
}

// y[m * ldy + r] for weight rows [row, row + rows) and any number of activation rows.
template <class F, Type T>
inline void multiply_bands(const Matrix& w, const float* x, int64_t ldx, int64_t batch, int64_t row, int64_t rows,
                           float* y, int64_t ldy) {
  for (int64_t band = row / kBand; band * kBand < row + rows; ++band) {
    const int64_t start = band * kBand;
    const int64_t begin = row > start ? row : start;
    const int64_t end = row + rows < start + kBand ? row + rows : start + kBand;
    int64_t m = 0;
    const auto take = [&]<int M>(std::integral_constant<int, M>) {
      for (; batch - m >= M; m += M) {
        constexpr int R = band_vectors(M);
        alignas(64) float out[M][kBand];
        for (int64_t lane = 0; lane < kBand; lane += R * W) meet_band<F, T, M, R>(w, x + m * ldx, ldx, band, lane, out);
        for (int i = 0; i < M; ++i) {
          float* to = y + (m + i) * ldy + begin - row;
          __builtin_memcpy(to, &out[i][begin - start], static_cast<size_t>(end - begin) * sizeof(float));
        }
      }
    };
    if constexpr (kMostRows == 8) take(std::integral_constant<int, 8>{});
    take(std::integral_constant<int, 4>{});
    take(std::integral_constant<int, 2>{});
    take(std::integral_constant<int, 1>{});
  }
}

inline void multiply(const Matrix& w, const float* x, int64_t ldx, int64_t batch, int64_t row, int64_t rows, float* y,
                     int64_t ldy) {
  with_words(w, [&](auto format) {
    using F = decltype(format);
    switch (w.type) {
      case Type::f16: return multiply_bands<F, Type::f16>(w, x, ldx, batch, row, rows, y, ldy);
      case Type::bf16: return multiply_bands<F, Type::bf16>(w, x, ldx, batch, row, rows, y, ldy);
      default: return multiply_bands<F, Type::f32>(w, x, ldx, batch, row, rows, y, ldy);
    }
  });
}

}  // namespace headrace::HEADRACE_ISA
