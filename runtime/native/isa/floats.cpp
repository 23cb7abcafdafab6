// Activation rows times a matrix in floats (integers: bands.cpp).
//
// Rows do not affect each other: k is split into slabs; a slab's products are summed per lane in order, then the lanes, then the slabs
// in order. Up to F::kStreamed rows stream the weights: one, but on AVX2 and AVX-512 four for plain weights, fp8, and
// 3, 5 and 6 bits (weights.h). For more rows, a few unpacked weight rows at a time stay in the L1 for all of them.
//
// Below, x has prepared rows of activations (prepare.h), or a slab of them, `stride` floats apart. y[m * ldy + r] is the product of
// activation row m with weight row r of the call: rows of y are `ldy` floats apart. `apart` is the distance of weight rows that are read
// side by side, in rows, and so of their products in y, in floats.
//
// Guard: runtime/native/tests/projections.cpp (every format, exact); tests/runtime/ops/test_native_kernels.py.
#include "parts.h"
#include "unpack.h"

namespace headrace::HEADRACE_ISA {

constexpr int64_t kSlab = 768;  // values of k, whole blocks and groups of every format
constexpr int64_t kUnpacked = 8;  // unpacked weight rows of a slab: half of the L1
constexpr int kTogether = kPanelVectors == 4 ? 6 : 3;  // activation rows whose sums fit the registers beside four weight rows

// y[m * ldy + r * apart] (+)= the sum of the lanes of acc[m][r]. R is 1, 2 or 4.
template <int M, int R>
[[gnu::always_inline]] inline void add_sums(const vf (&acc)[M][R], bool add_to, float* y, int64_t ldy, int64_t apart) {
  for (int m = 0; m < M; ++m) {
    alignas(16) float out[4];
    const vf* a = acc[m];
    // Four sums at once. Of fewer than four vectors the first one is repeated, since a[R] does not exist; those sums are not used.
    store_sums4(out, a[0], a[R > 1 ? 1 : 0], a[R > 2 ? 2 : 0], a[R > 3 ? 3 : 0]);
    float* to = y + m * ldy;
    if (add_to) {
      for (int r = 0; r < R; ++r) out[r] += to[r * apart];
    }
    for (int r = 0; r < R; ++r) to[r * apart] = out[r];
  }
}

// acc[m][r] += x[m] * v[r], lane by lane, for one vector of k: x is the vector of row 0.
template <int M, int R>
[[gnu::always_inline]] inline void meet(const float* x, int64_t stride, const vf (&v)[R], vf (&acc)[M][R]) {
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    const vf xs = load(x + m * stride);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) acc[m][r] = fma(v[r], xs, acc[m][r]);
  }
}

template <int M, int R>
[[gnu::always_inline]] inline void clear(vf (&acc)[M][R]) {
  for (int m = 0; m < M; ++m) {
    for (int r = 0; r < R; ++r) acc[m][r] = zero();
  }
}

// M activation rows times R weight rows, row, row + apart, ..., each a stream for the hardware prefetcher. (Four neighbouring rows,
// block by block, are half as fast.) y: of weight row `row`.
template <class F, int M, int R>
inline void stream_rows(const Matrix& w, const Groups<F>& groups, const float* x, int64_t stride, int64_t row, int64_t apart, float* y,
                        int64_t ldy) {
  const RowReader<F, R, true> reader(w, groups, row, apart);
  for (int64_t k = 0; k < w.k; k += kSlab) {
    vf acc[M][R];
    clear(acc);
    reader.walk(k, w.k - k < kSlab ? w.k : k + kSlab, [&](int64_t b, int step, int r, vf v) __attribute__((always_inline)) {
      const float* at = x + (b * F::kSteps + step) * W;
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) acc[m][r] = fma(v, load(at + m * stride), acc[m][r]);
    });
    add_sums(acc, k != 0, y, ldy, apart);
  }
}

// M rows of activations and R of unpacked weights (R, kSlab), over `vectors` of a slab.
template <int M, int R>
inline void tile(const float* x, int64_t stride, const float* weights, int64_t vectors, bool add_to, float* y,
                      int64_t ldy) {
  vf acc[M][R];
  clear(acc);
  for (int64_t i = 0; i < vectors; ++i) {
    vf v[R];
    for (int r = 0; r < R; ++r) v[r] = load(weights + r * kSlab + i * W);
    meet(x + i * W, stride, v, acc);
  }
  add_sums(acc, add_to, y, ldy, 1);
}

// M rows of activations and all of the unpacked weights (rows, kSlab), rows <= kUnpacked.
template <int M>
inline void tiles_of(const float* x, int64_t stride, const float* weights, int64_t rows, int64_t vectors, bool add_to,
                     float* y, int64_t ldy) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) tile<M, 4>(x, stride, weights + r * kSlab, vectors, add_to, y + r, ldy);
  for (; r < rows; ++r) tile<M, 1>(x, stride, weights + r * kSlab, vectors, add_to, y + r, ldy);
}

// The same for a number of activation rows, batch <= kTogether, at run time.
inline void tiles(const float* x, int64_t stride, int64_t batch, const float* weights, int64_t rows, int64_t vectors,
                  bool add_to, float* y, int64_t ldy) {
  switch (batch) {
    case 1: return tiles_of<1>(x, stride, weights, rows, vectors, add_to, y, ldy);
    case 2: return tiles_of<2>(x, stride, weights, rows, vectors, add_to, y, ldy);
    case 3: return tiles_of<3>(x, stride, weights, rows, vectors, add_to, y, ldy);
    case 4: return tiles_of<4>(x, stride, weights, rows, vectors, add_to, y, ldy);
    case 5: return tiles_of<5>(x, stride, weights, rows, vectors, add_to, y, ldy);
    default: return tiles_of<6>(x, stride, weights, rows, vectors, add_to, y, ldy);
  }
}

// Any number of activation rows times weight rows [first, first + rows), which are unpacked slab by slab, kUnpacked rows at a time.
template <class F>
inline void multiply_several(const Matrix& w, const float* x, int64_t stride, int64_t batch, int64_t first, int64_t rows,
                             float* y, int64_t ldy) {
  alignas(64) float weights[kUnpacked * kSlab];
  const Groups<F> groups(w);
  for (int64_t k = 0; k < w.k; k += kSlab) {
    const int64_t end = w.k - k < kSlab ? w.k : k + kSlab;
    const int64_t vectors = ceil_div(end - k, F::kBlock) * F::kSteps;
    const float* here = x + k;  // a slab is a whole number of blocks
    for (int64_t r = 0; r < rows; r += kUnpacked) {
      const int64_t n = rows - r < kUnpacked ? rows - r : kUnpacked;
      for (int64_t i = 0; i < n; ++i) unpack_row<F>(w, groups, first + r + i, k, end, weights + i * kSlab);
      for (int64_t m = 0; m < batch; m += kTogether) {
        const int64_t together = batch - m < kTogether ? batch - m : kTogether;
        tiles(here + m * stride, stride, together, weights, n, vectors, k != 0, y + m * ldy + r, ldy);
      }
    }
  }
}

// M rows of activations, or `batch` if that is less, for which weights are not worth to be unpacked in memory.
template <class F, int M = F::kStreamed>
inline void multiply_few(const Matrix& w, const float* x, int64_t stride, int64_t batch, int64_t first, int64_t rows, float* y,
                         int64_t ldy) {
  if constexpr (M > 1) {
    if (batch < M) return multiply_few<F, M - 1>(w, x, stride, batch, first, rows, y, ldy);
  }
  constexpr int R = 4 * M <= kAccumulators ? 4 : 2;
  const Groups<F> groups(w);
  const int64_t apart = rows / R, rest = R * apart;  // R streams of `apart` rows each; the last rows - rest < R are left over
  for (int64_t row = 0; row < apart; ++row) stream_rows<F, M, R>(w, groups, x, stride, first + row, apart, y + row, ldy);
  if constexpr (M > 1) {
    multiply_several<F>(w, x, stride, M, first + rest, rows - rest, y + rest, ldy);
  } else {
    for (int64_t row = rest; row < rows; ++row) stream_rows<F, 1, 1>(w, groups, x, stride, first + row, 0, y + row, ldy);
  }
}

void multiply_floats(const Matrix& w, const float* x, int64_t stride, int64_t batch, int64_t row, int64_t rows,
                     float* y, int64_t ldy) {
  with_format(w, [&](auto format) {
    using F = decltype(format);
    if (batch <= F::kStreamed) {
      multiply_few<F>(w, x, stride, batch, row, rows, y, ldy);
    } else {
      multiply_several<F>(w, x, stride, batch, row, rows, y, ldy);
    }
  });
}

}  // namespace headrace::HEADRACE_ISA
