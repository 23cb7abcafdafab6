// Rounded activation rows times a matrix of 2-, 4-, 5-, 6- or 8-bit weights: decode, small batches and prefill alike.
//
// Weights are interleaved (core/interleaved.h): a lane belongs to a weight row, each word is multiplied with two or four values of every
// activation row, and nothing is summed across lanes. A band is read sequentially; further activation rows find it in the cache.
//
// x: prepared rows in the layout of rounded.h, `ldx` floats apart. y[m * ldy + r] as in Kernels::multiply.
// Guard: runtime/native/tests/projections.cpp and experts.cpp; tests/runtime/ops/test_native_kernels.py, test_coarse_activations.py
// (8 bits) and test_native_row_bits.py (the same bits in any batch).
#include <type_traits>

#include "parts.h"
#include "rounded.h"

namespace headrace::HEADRACE_ISA {

// Most bands read side by side. The hardware prefetcher follows each page separately, and one page at a time does not reach full
// memory bandwidth.
constexpr int kMostBands = 4;
// Prefetch distance in bytes, of all bands read side by side; the hardware prefetcher restarts at every page.
constexpr int64_t kWordsAhead = 8192;

constexpr int kWordBytes = 4;

// Most activation rows per word, and the vectors of a band that fit the registers beside them.
constexpr int kMostRows = kAccumulators / 2 < 8 ? kAccumulators / 2 : 8;
constexpr int band_vectors(int rows) {
  int vectors = static_cast<int>(kBand) / W;
  while (vectors * rows > kAccumulators) vectors /= 2;
  return vectors;
}
// Most bands side by side for so many rows; whole bands only.
constexpr int bands_at_once(int rows) {
  constexpr int kWhole = static_cast<int>(kBand) / W;
  const int room = kAccumulators / ((rows < 2 ? 2 : rows) * kWhole);
  return room < 1 ? 1 : room < kMostBands ? room : kMostBands;
}

// Calls body(std::integral_constant<int, count>{}) for 1 to 8 rows.
template <class Body>
[[gnu::always_inline]] inline void with_rows(int64_t count, const Body& body) {
  switch (count) {
    case 8: return body(std::integral_constant<int, 8>{});
    case 7: return body(std::integral_constant<int, 7>{});
    case 6: return body(std::integral_constant<int, 6>{});
    case 5: return body(std::integral_constant<int, 5>{});
    case 4: return body(std::integral_constant<int, 4>{});
    case 3: return body(std::integral_constant<int, 3>{});
    case 2: return body(std::integral_constant<int, 2>{});
    default: return body(std::integral_constant<int, 1>{});
  }
}

// A band's words, scales and offsets, and the strides in bytes to those of the next band, which are read side by side. Without offsets
// `offsets` is `scales`, so that it may be prefetched.
struct Streams {
  const char* words;
  const char* scales;
  const char* offsets;
  int64_t words_apart;
  int64_t scales_apart;

  Streams(const Matrix& w, int64_t band)
      : words_apart(w.row_bytes() * kBand), scales_apart(w.groups() * kBand * size_of(w.type)) {
    words = static_cast<const char*>(w.data) + band * words_apart;
    scales = static_cast<const char*>(w.scales) + band * scales_apart;
    offsets = w.offsets == nullptr ? scales : static_cast<const char*>(w.offsets) + band * scales_apart;
  }

  // Prefetch the whole band.
  void request_all() const {
    for (int64_t i = 0; i < words_apart; i += 64) request(words + i);
    for (int64_t i = 0; i < scales_apart; i += 64) {
      request(scales + i);
      if (offsets != scales) request(offsets + i);
    }
  }
};

// The high parts of a row's outliers (Quads), added to its products. entries: four arrays of `count`, as Quads has them behind the sums:
// high parts, dwords' offsets, bits, scales' offsets; out (B, kBand).
template <class X, Type T, int R, int B>
[[gnu::always_inline]] inline void add_outliers(const Matrix& w, const float* entries, const Streams& here, int64_t lane, float* out) {
  const int64_t count = X::outliers(w);
  const auto part = [&](int number, int64_t e) __attribute__((always_inline)) {
    return static_cast<int64_t>(__builtin_bit_cast(int32_t, entries[number * count + e]));
  };
  vf sums[B * R];
#pragma GCC unroll 16
  for (int r = 0; r < B * R; ++r) sums[r] = load(&out[r / R * kBand + lane + r % R * W]);
  for (int64_t e = 0; e < count; ++e) {
    const vf high = set1(entries[e]);
    const int64_t word = part(1, e) + lane, scale_at = part(3, e) + lane;
#pragma GCC unroll 16
    for (int r = 0; r < B * R; ++r) {
      const auto* words = reinterpret_cast<const uint32_t*>(here.words + r / R * here.words_apart) + word + r % R * W;
      const vf weights = X::F::number(load_words(words), entries + 2 * count + e);
      vf scale = load_as<T>(here.scales + r / R * here.scales_apart, scale_at + r % R * W), offset;
      X::F::fit(scale, offset);
      sums[r] = fma(mul(scale, high), weights, sums[r]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < B * R; ++r) store(&out[r / R * kBand + lane + r % R * W], sums[r]);
}

// out[m][b * kBand + lane + i] = w[(band + b) * kBand + lane + i] . x[m] for i < R * W and b < B. Rows of x are ldx apart;
// `next`: data to prefetch. Sums are in memory, products of the current group in registers, split in two for few rows to shorten the
// chains of additions.
template <class X, Type T, int M, int R, int B>
[[gnu::always_inline]] inline void meet_bands(const Matrix& w, const float* x, int64_t ldx, int64_t band, int64_t lane,
                                              const Streams& next, float (&out)[M][B * kBand]) {
  using F = typename X::F;
  constexpr int kWords = X::kWords;
  constexpr bool kAhead = X::kEach == 2;  // prefetch; of 8 bits, whose rows are many, multiply_bands does so once for all
  constexpr int kChains = 4 * M * R * B <= kAccumulators ? 2 : 1;
  const int64_t group_words = X::group(w) / F::kSteps, groups = X::groups(w);
  const int sharing = __builtin_ctzll(static_cast<uint64_t>(w.group / X::group(w)));  // 2^sharing groups have one scale of weights
  const Streams here(w, band);
  const int64_t apart = here.words_apart / static_cast<int64_t>(sizeof(uint32_t));
  const auto* words = reinterpret_cast<const uint32_t*>(here.words) + lane;
  const int64_t group_bytes = (group_words + F::kPlaned * (group_words / F::kLow)) * kBand * kWordBytes;
  const int64_t groups_ahead = B * group_bytes < kWordsAhead ? kWordsAhead / (B * group_bytes) : 1;
  const float* scales = x + X::scales_at(w);
  const float* sums = x + X::sums_at(w);
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 16
    for (int r = 0; r < B * R; ++r) store(&out[m][r / R * kBand + lane + r % R * W], zero());
  }
  const float* rows[M];  // hidden from the compiler, which otherwise keeps an offset per row and step and spills registers
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    rows[m] = x + m * ldx;
    asm("" : "+r"(rows[m]));
  }

  // A group of activations: its products as integers, in which nothing is rounded, then scaled and added to `out`.
  for (int64_t g = 0; g < groups; ++g) {
    const bool inside = g + groups_ahead < groups;
    const Streams& later = inside ? here : next;
    const int64_t later_group = g + groups_ahead - (inside ? 0 : groups);
    const char* words_ahead = later.words + later_group * group_bytes + lane * kWordBytes;
    vi dot[kChains][M][B * R] = {};
    if constexpr (F::kSymmetric) {  // products begin at the row's integer for weights of 0 (rounded.h)
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const vi start = set1_word(sums + m * ldx + g);
#pragma GCC unroll 16
        for (int r = 0; r < B * R; ++r) dot[0][m][r] = start;
      }
    }
    vi high[F::kPlaned ? B * R : 1];
    for (int64_t i = 0; i < group_words; ++i, words += kBand, words_ahead += kBand * kWordBytes) {
      if constexpr (F::kPlaned) {
        if (i % F::kLow == 0) {  // the dword of high bits, behind the kLow dwords that share it
#pragma GCC unroll 16
          for (int r = 0; r < B * R; ++r) {
            high[r] = load_words(words + F::kLow * kBand + r / R * apart + r % R * W);
            if (kAhead && r % R * W % 16 == 0) {
              request(words_ahead + r / R * later.words_apart + (F::kLow * kBand + r % R * W) * kWordBytes);
            }
          }
        }
      }
      vi packed[B * R];
#pragma GCC unroll 16
      for (int r = 0; r < B * R; ++r) {
        packed[r] = load_words(words + r / R * apart + r % R * W);
        if (kAhead && r % R * W % 16 == 0) {
          request(words_ahead + r / R * later.words_apart + r % R * W * kWordBytes);
        }
      }
#pragma GCC unroll 8
      for (int s = 0; s < kWords; ++s) {
        vi weights[B * R];
#pragma GCC unroll 16
        for (int r = 0; r < B * R; ++r) {
          if constexpr (F::kPlaned) {
            weights[r] = F::take(packed[r], high[r], s);
          } else {
            weights[r] = X::take(packed[r], s);
          }
        }
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
          const vi xs = set1_word(rows[m] + s);
          vi(&sum)[B * R] = dot[s % kChains][m];
#pragma GCC unroll 16
          for (int r = 0; r < B * R; ++r) sum[r] = X::dot(sum[r], weights[r], xs);
        }
      }
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        rows[m] += kWords;
        asm("" : "+r"(rows[m]));
      }
      if constexpr (F::kPlaned) {
#pragma GCC unroll 16
        for (int r = 0; r < B * R; ++r) high[r] = shift_right(high[r], 2 * F::kHigh);
        if (i % F::kLow == F::kLow - 1) {
          words += kBand;  // of high bits
          words_ahead += kBand * kWordBytes;
        }
      }
    }

    // The weights' scales and offsets of the group, then out += scale * x_scale * dot + offset * x_sum.
    vf scale[B * R], offset[B * R];
#pragma GCC unroll 16
    for (int r = 0; r < B * R; ++r) {
      const int64_t at = (g >> sharing) * kBand + lane + r % R * W;
      scale[r] = load_as<T>(here.scales + r / R * here.scales_apart, at);
      if constexpr (F::kAffine) offset[r] = load_as<T>(here.offsets + r / R * here.scales_apart, at);
      F::fit(scale[r], offset[r]);
      if (kAhead && r % R * W * size_of(T) % 64 == 0) {
        const int64_t to = r / R * later.scales_apart + ((later_group >> sharing) * kBand + lane + r % R * W) * size_of(T);
        request(later.scales + to);
        if constexpr (F::kAffine) request(later.offsets + to);
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const vf x_scale = set1(scales[m * ldx + g]), x_sum = set1(sums[m * ldx + g]);
#pragma GCC unroll 16
      for (int r = 0; r < B * R; ++r) {
        float* to = &out[m][r / R * kBand + lane + r % R * W];
        vi whole = dot[0][m][r];
        if constexpr (kChains == 2) whole = add_words(whole, dot[1][m][r]);
        const vf so_far = F::kSymmetric ? load(to) : fma(offset[r], x_sum, load(to));
        store(to, fma(mul(scale[r], x_scale), to_float(whole), so_far));
      }
    }
  }
  if constexpr (X::kEach == 4) {
    for (int m = 0; m < M; ++m) add_outliers<X, T, R, B>(w, sums + m * ldx + groups, here, lane, out[m]);
  }
}

// Activation rows, at most, that meet weights in planes line by line; of more, sums take the registers either way. Measured on AVX2 alone.
constexpr int kLineByLine = W == 8 ? 2 : 0;

// The same for a band of weights in planes: within each group a cache line of words (kLineRows weight rows) at a time, and all dwords that
// share one of high bits as one piece of code, so that neither high bits nor sums leave 16 registers.
template <class X, Type T, int M>
[[gnu::always_inline]] inline void meet_planes(const Matrix& w, const float* x, int64_t ldx, int64_t band, const Streams& next,
                                               float (&out)[M][kBand]) {
  using F = typename X::F;
  constexpr int kLineRows = 64 / kWordBytes, R = kLineRows / W;
  constexpr int64_t kPlaneWords = (F::kLow + 1) * kBand;  // of a band: low dwords and those of high bits
  const int64_t groups = w.groups(), blocks = w.group / (F::kLow * F::kSteps), group_bytes = blocks * kPlaneWords * kWordBytes;
  const int64_t groups_ahead = group_bytes < kWordsAhead ? kWordsAhead / group_bytes : 1;
  const Streams here(w, band);
  const float* scales = x + X::scales_at(w);
  const float* sums = x + X::sums_at(w);
  __builtin_memset(out, 0, sizeof out);
  for (int64_t g = 0; g < groups; ++g) {
    const bool inside = g + groups_ahead < groups;
    const Streams& later = inside ? here : next;
    const int64_t later_group = g + groups_ahead - (inside ? 0 : groups);
    // All lines of a group in their order, which the processor's own prefetching follows.
    const char* words_ahead = later.words + later_group * group_bytes;
    for (int64_t byte = 0; byte < group_bytes; byte += 64) request(words_ahead + byte);
    for (int64_t lane = 0; lane < kBand; lane += kLineRows) {
      const auto* words = reinterpret_cast<const uint32_t*>(here.words + g * group_bytes) + lane;
      const float* rows[M];
      vi dot[M][R] = {};
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        rows[m] = x + m * ldx + g * w.group / X::kEach;
        if constexpr (F::kSymmetric) {
          const vi start = set1_word(sums + m * ldx + g);
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) dot[m][r] = start;
        }
      }
      for (int64_t block = 0; block < blocks; ++block, words += kPlaneWords) {
        vi high[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) high[r] = load_words(words + F::kLow * kBand + r * W);
#pragma GCC unroll 4
        for (int j = 0; j < F::kLow; ++j) {
          vi low[R];
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) low[r] = load_words(words + j * kBand + r * W);
#pragma GCC unroll 4
          for (int s = 0; s < X::kWords; ++s) {
            vi weights[R];
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) weights[r] = F::take(low[r], high[r], s, j);
#pragma GCC unroll 8
            for (int m = 0; m < M; ++m) {
              const vi xs = set1_word(rows[m] + j * X::kWords + s);
#pragma GCC unroll 4
              for (int r = 0; r < R; ++r) dot[m][r] = X::dot(dot[m][r], weights[r], xs);
            }
          }
        }
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) rows[m] += F::kLow * X::kWords;
      }
      vf scale[R], offset[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const int64_t at = g * kBand + lane + r * W;
        scale[r] = load_as<T>(here.scales, at);
        if constexpr (F::kAffine) offset[r] = load_as<T>(here.offsets, at);
      }
      if (lane * size_of(T) % 64 == 0) {
        const int64_t to = (later_group * kBand + lane) * size_of(T);
        request(later.scales + to);
        if constexpr (F::kAffine) request(later.offsets + to);
      }
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const vf x_scale = set1(scales[m * ldx + g]), x_sum = set1(sums[m * ldx + g]);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          float* to = &out[m][lane + r * W];
          const vf so_far = F::kSymmetric ? load(to) : fma(offset[r], x_sum, load(to));
          store(to, fma(mul(scale[r], x_scale), to_float(dot[m][r]), so_far));
        }
      }
    }
  }
}

// Values of k that are unpacked at once: whole groups of every format. Their words and those of a few activation rows fit the L1.
constexpr int64_t kSlab = 256;
constexpr int64_t kLeastGroup = 16;
constexpr int64_t kMostSlabRows = 64;  // activation rows that meet them
constexpr int kPlanedSlabRows = 8;     // activation rows from which weights in planes are unpacked so; others from kSlabRows on

// Up to kSlab values of a band's rows, each unpacked word beside that of the next rows, and their scales as floats.
template <class X>
struct Slab {
  using F = typename X::F;
  static constexpr int kVectors = static_cast<int>(kBand) / W;
  vi words[kSlab / X::kEach][kVectors];
  vf scales[kSlab / kLeastGroup][kVectors];
  vf offsets[F::kSymmetric ? 1 : kSlab / kLeastGroup][kVectors];

  // Values [k, k + count); k is a multiple of kSlab.
  template <Type T>
  void unpack(const Matrix& w, const Streams& band, int64_t k, int64_t count) {
    const auto* from = reinterpret_cast<const uint32_t*>(band.words) + k / F::kSteps / F::kLow * (F::kLow + F::kPlaned) * kBand;
    vi(*to)[kVectors] = words;
    for (int64_t i = 0; i < count / F::kSteps; i += F::kLow, from += F::kPlaned * kBand) {
      const auto* high = from + F::kLow * kBand;
      for (int j = 0; j < F::kLow; ++j, from += kBand, to += X::kWords) {
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          const vi packed = load_words(from + v * W);
#pragma GCC unroll 8
          for (int s = 0; s < X::kWords; ++s) {
            if constexpr (F::kPlaned) {
              to[s][v] = F::take(packed, load_words(high + v * W), s, j);
            } else {
              to[s][v] = X::take(packed, s);
            }
          }
        }
      }
    }
    const int64_t group = X::group(w);
    for (int64_t g = 0; g < count / group; ++g) {
      const int64_t at = (k + g * group) / w.group * kBand;
      for (int v = 0; v < kVectors; ++v) {
        vf scale = load_as<T>(band.scales, at + v * W), offset = zero();
        if constexpr (F::kAffine) offset = load_as<T>(band.offsets, at + v * W);
        F::fit(scale, offset);
        scales[g][v] = scale;
        if constexpr (!F::kSymmetric) offsets[g][v] = offset;
      }
    }
  }
};

// Adds the products of M activation rows with `count` values from k on to out (M, kBand), in the order of meet_bands: a row has the same
// bits by either way.
template <class X, int M>
inline void meet_slab(const Matrix& w, const Slab<X>& slab, const float* x, int64_t ldx, int64_t k, int64_t count, float (*out)[kBand]) {
  using F = typename X::F;
  constexpr int R = band_vectors(M);
  const int64_t group = X::group(w), first = k / group;
  const float* scales = x + X::scales_at(w) + first;
  const float* sums = x + X::sums_at(w) + first;
  for (int v = 0; v < Slab<X>::kVectors; v += R) {
    const vi* words = slab.words[0] + v;
    const float* rows[M];  // hidden from the compiler, as in meet_bands
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      rows[m] = x + m * ldx + k / X::kEach;
      asm("" : "+r"(rows[m]));
    }
    for (int64_t g = 0; g < count / group; ++g) {
      vi dot[M][R] = {};
      for (int64_t i = 0; i < group / X::kEach; i += X::kWords) {
#pragma GCC unroll 8
        for (int s = 0; s < X::kWords; ++s, words += Slab<X>::kVectors) {
#pragma GCC unroll 8
          for (int m = 0; m < M; ++m) {
            const vi xs = set1_word(rows[m] + s);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) dot[m][r] = X::dot_in_group(dot[m][r], words[r], xs);
          }
        }
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
          rows[m] += X::kWords;
          asm("" : "+r"(rows[m]));
        }
      }
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const float* x_sum = sums + m * ldx + g;
        const vf x_scale = set1(scales[m * ldx + g]);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          float* to = &out[m][(v + r) * W];
          vi whole = X::group_sum(dot[m][r]);
          if constexpr (F::kSymmetric) whole = add_words(whole, set1_word(x_sum));
          const vf so_far = F::kSymmetric ? load(to) : fma(slab.offsets[g][v + r], set1(*x_sum), load(to));
          store(to, fma(mul(slab.scales[g][v + r], x_scale), to_float(whole), so_far));
        }
      }
    }
  }
}

// The same as multiply_bands for many activation rows: every word is unpacked once for kMostSlabRows of them.
template <class X, Type T>
inline void multiply_slabs(const Matrix& w, const float* x, int64_t ldx, int64_t batch, int64_t row, int64_t rows, float* y, int64_t ldy,
                           const Upcoming& next) {
  Slab<X> slab;
  alignas(64) float out[kMostSlabRows][kBand];
  const int64_t end_band = (row + rows + kBand - 1) / kBand;
  for (int64_t band = row / kBand; band < end_band; ++band) {
    const Streams here(w, band);
    const bool beyond = band + 1 == end_band && next.w != nullptr;
    (beyond ? Streams(*next.w, next.row / kBand) : Streams(w, band + 1)).request_all();
    const int64_t start = band * kBand;
    const int64_t begin = row > start ? row : start;
    const int64_t end = row + rows < start + kBand ? row + rows : start + kBand;
    for (int64_t first = 0; first < batch; first += kMostSlabRows) {
      const int64_t together = batch - first < kMostSlabRows ? batch - first : kMostSlabRows;
      const float* from = x + first * ldx;
      __builtin_memset(out, 0, static_cast<size_t>(together) * sizeof out[0]);
      const int64_t parts = (together + kMostRows - 1) / kMostRows;
      for (int64_t k = 0; k < w.k; k += kSlab) {
        const int64_t count = w.k - k < kSlab ? w.k - k : kSlab;
        slab.template unpack<T>(w, here, k, count);
        int64_t m = 0;
        const auto rows_of = [&]<int M>(std::integral_constant<int, M>) {
          if constexpr (M <= kMostRows) meet_slab<X, M>(w, slab, from + m * ldx, ldx, k, count, out + m);
          m += M;
        };
        for (int64_t part = 0; part < parts; ++part) with_rows((together + part) / parts, rows_of);
      }
      for (int64_t m = 0; m < together; ++m) {
        if constexpr (X::kEach == 4) {
          const float* outliers = from + m * ldx + X::sums_at(w) + X::groups(w);
          add_outliers<X, T, Slab<X>::kVectors, 1>(w, outliers, here, 0, out[m]);
        }
        __builtin_memcpy(y + (first + m) * ldy + begin - row, &out[m][begin - start], static_cast<size_t>(end - begin) * sizeof(float));
      }
    }
  }
}

// y[m * ldy + r] for weight rows [row, row + rows) and any number of activation rows; `next`: rows to prefetch.
template <class X, Type T>
inline void multiply_bands(const Matrix& w, const float* x, int64_t ldx, int64_t batch, int64_t row, int64_t rows,
                           float* y, int64_t ldy, const Upcoming& next) {
  constexpr int kFrom = X::kInSlabs ? X::F::kPlaned ? kPlanedSlabRows : kSlabRows : 0;
  if constexpr (kFrom != 0) {
    if (batch >= kFrom) return multiply_slabs<X, T>(w, x, ldx, batch, row, rows, y, ldy, next);
  }
  const int64_t end_band = (row + rows + kBand - 1) / kBand;
  // Activation rows [m, m + M) by bands [band, band + B).
  const auto take = [&]<int M, int B>(int64_t m, int64_t band, std::integral_constant<int, M>,
                                      std::integral_constant<int, B>) {
    constexpr int R = band_vectors(M);
    alignas(64) float out[M][B * kBand];
    const Streams after = band + B < end_band || next.w == nullptr ? Streams(w, band + B) : Streams(*next.w, next.row / kBand);
    if constexpr (X::F::kPlaned && B == 1 && M <= kLineByLine) {
      meet_planes<X, T, M>(w, x + m * ldx, ldx, band, after, out);
    } else {
      for (int64_t lane = 0; lane < kBand; lane += R * W) {
        meet_bands<X, T, M, R, B>(w, x + m * ldx, ldx, band, lane, after, out);
      }
    }
    const int64_t start = band * kBand;
    const int64_t begin = row > start ? row : start;
    const int64_t end = row + rows < start + B * kBand ? row + rows : start + B * kBand;
    for (int i = 0; i < M; ++i) {
      float* to = y + (m + i) * ldy + begin - row;
      if (end - begin == B * kBand) {
        __builtin_memcpy(to, out[i], sizeof out[i]);  // constant size: moves, no call
      } else {
        __builtin_memcpy(to, &out[i][begin - start], static_cast<size_t>(end - begin) * sizeof(float));
      }
    }
  };
  // Even parts, each of which unpacks the words again: nine rows are four and five.
  const int64_t parts = (batch + kMostRows - 1) / kMostRows, most = (batch + parts - 1) / parts;
  for (int64_t band = row / kBand; band < end_band;) {
    const int64_t left = end_band - band;
    // Six bands are three and three.
    const auto at_once = [&](int64_t bands) {
      const int64_t times = (left + bands - 1) / bands;
      return (left + times - 1) / times;
    };
    const int64_t here = at_once(bands_at_once(static_cast<int>(most)));
    if constexpr (X::kEach == 4) {
      for (int64_t at = band + here; at < band + 2 * here; ++at) {
        const bool beyond = at >= end_band && next.w != nullptr;
        (beyond ? Streams(*next.w, next.row / kBand + at - end_band) : Streams(w, at)).request_all();
      }
    }
    const auto all = [&]<int B>(std::integral_constant<int, B> width) {  // every activation row by B bands
      int64_t m = 0;
      const auto rows_of = [&]<int M>(std::integral_constant<int, M> count) {
        if constexpr (M <= kMostRows && B <= bands_at_once(M)) take(m, band, count, width);
        m += M;
      };
      for (int64_t part = 0; part < parts; ++part) with_rows((batch + part) / parts, rows_of);
    };
    switch (here) {
      case 4: all(std::integral_constant<int, 4>{}); break;
      case 3: all(std::integral_constant<int, 3>{}); break;
      case 2: all(std::integral_constant<int, 2>{}); break;
      default: all(std::integral_constant<int, 1>{}); break;
    }
    band += here;
  }
}

void multiply(const Matrix& w, const float* x, int64_t ldx, int64_t batch, int64_t row, int64_t rows, float* y,
              int64_t ldy, const Upcoming& next) {
  with_integers(w, [&]<class F>(F) {
    with_scales<F>(w, [&](auto type) {
      constexpr Type T = decltype(type)::value;
      if constexpr (!F::kPlaned) {
        if (w.rounding == 8) return multiply_bands<Quads<F>, T>(w, x, ldx, batch, row, rows, y, ldy, next);
      }
      multiply_bands<Pairs<F>, T>(w, x, ldx, batch, row, rows, y, ldy, next);
    });
  });
}

}  // namespace headrace::HEADRACE_ISA
