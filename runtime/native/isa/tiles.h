// Several rounded activation rows times a matrix of 2-, 4- or 8-bit weights: small batches and prefill.
//
// R * W weight rows are turned at a time, words and scales alike, so that a lane belongs to a weight row: each word of
// weights then meets one pair of every activation row, and no sums across lanes are left. What was turned serves all rows.
#pragma once

#include <type_traits>

#include "rounded.h"

namespace headrace::HEADRACE_ISA {

constexpr int64_t kTileWords = 192;  // of a weight row, turned at a time: with R = 2, half a first-level cache of them

// Words [begin, end) of the weight rows [row, row + rows), rows <= R * W: turned[word - begin][part], a lane to a row.
template <class F, int R>
struct TurnedTile {
  static constexpr int64_t kGroups = kTileWords * F::kSteps / 32;

  vi words[kTileWords][R];
  vf scales[kGroups][R], offsets[kGroups][R];

  void turn(const Matrix& w, int64_t row, int64_t rows, int64_t begin, int64_t end) {
    const int64_t group_words = w.group / F::kSteps;
    for (int part = 0; part < R; ++part) {
      int64_t source[W];  // beyond `rows` the last row again: those lanes are not stored
      for (int r = 0; r < W; ++r) source[r] = row + (part * W + r < rows ? part * W + r : rows - 1);
      turn_words(w, source, begin, end, part);
      const auto turn_both = [&]<Type T>(std::integral_constant<Type, T>) {
        turn_numbers<T>(w.scales, source, w.groups(), begin / group_words, end / group_words, part, scales);
        turn_numbers<T>(w.offsets, source, w.groups(), begin / group_words, end / group_words, part, offsets);
      };
      if (w.type == Type::f16) turn_both(std::integral_constant<Type, Type::f16>{});
      else if (w.type == Type::bf16) turn_both(std::integral_constant<Type, Type::bf16>{});
      else turn_both(std::integral_constant<Type, Type::f32>{});
    }
  }

 private:
  void turn_words(const Matrix& w, const int64_t (&source)[W], int64_t begin, int64_t end, int part) {
    const uint32_t* from[W];
    for (int r = 0; r < W; ++r) from[r] = reinterpret_cast<const uint32_t*>(row_data(w, source[r])) + begin;
    alignas(64) uint32_t padded[W][W];
    for (int64_t word = begin; word < end; word += W) {
      for (int r = 0; r < W; ++r) __builtin_prefetch(from[r] + R * W * w.row_bytes() / 4);
      if (end - word < W) {
        for (int r = 0; r < W; ++r) {
          store_words(reinterpret_cast<float*>(padded[r]), load_first_words(from[r], end - word));
          from[r] = padded[r];
        }
      }
      vi square[W];
      load_turned(from, square);
      for (int i = 0; i < W; ++i) words[word - begin + i][part] = square[i];
      for (int r = 0; r < W; ++r) from[r] += W;
    }
  }

  // groups: in a row.
  template <Type T>
  static void turn_numbers(const void* numbers, const int64_t (&source)[W], int64_t groups, int64_t begin, int64_t end,
                           int part, vf (&to)[kGroups][R]) {
    for (int64_t g = begin; g < end; g += W) {
      const int64_t n = end - g < W ? end - g : W;
      vf square[W];
      for (int r = 0; r < W; ++r) {
        const int64_t at = source[r] * groups + g;
        __builtin_prefetch(static_cast<const uint8_t*>(numbers) + (at + R * W * groups) * size_of(T));
        square[r] = n == W ? load_as<T>(numbers, at) : load_first_as<T>(numbers, at, n);
      }
      transpose(square);
      for (int i = 0; i < n; ++i) to[g - begin + i][part] = square[i];
    }
  }
};

// acc[m][part] += w . x[m] over the words of a tile. Rows of x are ldx apart. acc is memory, as registers hold the products
// of the group at hand.
template <class F, int R, int M>
[[gnu::always_inline]] inline void meet_tile(const TurnedTile<F, R>& tile, const Matrix& w, const float* x, int64_t ldx,
                                             int64_t begin, int64_t end, float (&acc)[M][R][W]) {
  constexpr int kHalf = F::kSteps / 2;
  const auto group_words = static_cast<uint64_t>(w.group / F::kSteps);
  const uint64_t run = group_words < W ? group_words : W;  // words of a group that lie in one block
  const uint64_t first = static_cast<uint64_t>(begin), count = static_cast<uint64_t>(end - begin);
  const float* sums = x + Rounded<F>::sums_at(w) + first / group_words;

  for (uint64_t word = 0, g = 0; word < count; ++g) {
    vi dot[M][R] = {};
    const float* here = nullptr;
    for (const uint64_t stop = word + group_words; word < stop; word += run) {
      here = x + (first + word) / W * Rounded<F>::kBlockFloats + (first + word) % W;
      for (uint64_t i = 0; i < run; ++i) {
        vi left[R];
        for (int r = 0; r < R; ++r) left[r] = tile.words[word + i][r];
#pragma GCC unroll 8
        for (int s = 0; s < kHalf; ++s) {
          vi weights[R];
#pragma GCC unroll 2
          for (int r = 0; r < R; ++r) {
            weights[r] = pairs<F::kBits>(left[r], 0);
            left[r] = next_pairs<F::kBits>(left[r]);
          }
#pragma GCC unroll 8
          for (int m = 0; m < M; ++m) {
            const vi xs = set1_word(here + m * ldx + s * W + static_cast<int64_t>(i));
#pragma GCC unroll 2
            for (int r = 0; r < R; ++r) dot[m][r] = dot_pairs(dot[m][r], weights[r], xs);
          }
        }
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const vf scale = set1(here[m * ldx + kHalf * W]), sum = set1(sums[m * ldx + static_cast<int64_t>(g)]);
#pragma GCC unroll 2
      for (int r = 0; r < R; ++r) {
        const vf sums_so_far = fma(tile.offsets[g][r], sum, load(acc[m][r]));
        store(acc[m][r], fma(mul(tile.scales[g][r], scale), to_float(dot[m][r]), sums_so_far));
      }
    }
  }
}

// y[m * ldy + r] (+)= w[row + r] . x[m] over the words of a tile, r < rows.
template <class F, int R, int M>
inline void multiply_tile(const TurnedTile<F, R>& tile, const Matrix& w, const float* x, int64_t ldx, int64_t rows,
                          int64_t begin, int64_t end, float* y, int64_t ldy) {
  const auto each = [&](auto&& use) __attribute__((always_inline)) {
    for (int m = 0; m < M; ++m) {
      for (int part = 0; part < R; ++part) {
        const int64_t left = rows - part * W;
        use(m, part, y + m * ldy + part * W, left < W ? left : W);
      }
    }
  };
  alignas(64) float acc[M][R][W] = {};
  if (begin != 0) {
    each([&](int m, int part, const float* from, int64_t n) { store(acc[m][part], load_first(from, n)); });
  }
  meet_tile<F, R, M>(tile, w, x, ldx, begin, end, acc);
  each([&](int m, int part, float* to, int64_t n) { store_first(to, load(acc[m][part]), n); });
}

// y[m * ldy + r] for weight rows [row, row + rows), rows <= R * W: as many slabs of words as k has.
template <class F, int R>
inline void multiply_turned(const Matrix& w, const float* x, int64_t ldx, int64_t batch, int64_t row, int64_t rows,
                            float* y, int64_t ldy) {
  TurnedTile<F, R> tile;
  const int64_t words = w.k / F::kSteps;
  for (int64_t begin = 0; begin < words; begin += kTileWords) {
    const int64_t end = words - begin < kTileWords ? words : begin + kTileWords;
    tile.turn(w, row, rows, begin, end);
    int64_t m = 0;
    const auto take = [&]<int M>(std::integral_constant<int, M>) {
      for (; batch - m >= M; m += M) {
        multiply_tile<F, R, M>(tile, w, x + m * ldx, ldx, rows, begin, end, y + m * ldy, ldy);
      }
    };
    take(std::integral_constant<int, 8>{});
    take(std::integral_constant<int, 4>{});
    take(std::integral_constant<int, 2>{});
    take(std::integral_constant<int, 1>{});
  }
}

// y[m * ldy + r] for weight rows [row, row + rows) and any number of activation rows.
template <class F>
inline void multiply_tiles(const Matrix& w, const float* x, int64_t ldx, int64_t batch, int64_t row, int64_t rows,
                           float* y, int64_t ldy) {
  constexpr int64_t kTile = kTileParts * W;
  int64_t r = 0;
  for (; rows - r > kTile - W; r += kTile) {  // more than a narrower tile would hold
    const int64_t here = rows - r < kTile ? rows - r : kTile;
    multiply_turned<F, kTileParts>(w, x, ldx, batch, row + r, here, y + r, ldy);
  }
  if (r < rows) multiply_turned<F, 1>(w, x, ldx, batch, row + r, rows - r, y + r, ldy);
}

}  // namespace headrace::HEADRACE_ISA
