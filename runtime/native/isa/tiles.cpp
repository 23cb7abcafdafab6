// Rows of prompts times a matrix of 2-, 4- or 8-bit weights on AMX: bfloat16 tiles, three products for one (halves.h). Only with
// AVX-512.
//
// A slab of a band's weights is unpacked once for all rows. A tile's sums of a row do not depend on other rows, and slabs are added in
// order, so that a row has the same bits in any company.
//
// A row of x has w.k dwords, as halve_row makes them: w.k / 2 pairs of high parts, then the low parts of the same pairs.
// Guards: tests/runtime/ops/test_tiles.py and runtime/native/tests/projections.cpp.
#include "halves.h"
#include "parts.h"
#include "tiles.h"

namespace headrace::HEADRACE_ISA {

constexpr int64_t kSlab = 512;       // values of k
constexpr int64_t kBlock = 32;       // values of k in a tile
constexpr int64_t kTileFloats = kTileSide * kTileSide;

// A slab of a band: of each block, tiles of the high parts of the band's two halves, then of the low parts.
struct alignas(64) Unpacked {
  float blocks[kSlab / kBlock][4][kTileFloats];
};

// out: the weights of values [begin, end) of k of a band, high parts and what they leave. In each block pair p is row p of a tile.
template <class F, Type T>
inline void unpack_slab(const Matrix& w, int64_t band, int64_t begin, int64_t end, Unpacked& out) {
  constexpr int kWords = Pairs<F>::kWords;  // pairs in a dword
  const auto* words = static_cast<const uint32_t*>(w.data) + band * kBand * (w.k / F::kSteps);
  const int64_t first_scale = band * kBand * w.groups();
  for (int64_t k = begin; k < end; k += F::kSteps) {
    auto& block = out.blocks[(k - begin) / kBlock];
    const int64_t pair = (k - begin) % kBlock / 2;
    for (int64_t half = 0; half < 2; ++half) {
      const int64_t lane = half * W, at = first_scale + k / w.group * kBand + lane;
      vf scale = load_as<T>(w.scales, at), offset = zero();
      if constexpr (F::kSymmetric) {
        offset = mul(scale, set1(-static_cast<float>(1 << (F::kBits - 1))));
      } else if constexpr (F::kAffine) {
        offset = load_as<T>(w.offsets, at);
      }
      F::adapt(scale, offset);
      const vi packed = load_words(words + k / F::kSteps * kBand + lane);
      for (int s = 0; s < kWords; ++s) {
        vf a = fma(F::value(packed, s), scale, offset), b = fma(F::value(packed, s + kWords), scale, offset);
        store_words(&block[half][(pair + s) * W], split(a, b));
        store_words(&block[2 + half][(pair + s) * W], split(a, b));
      }
    }
  }
}

// Up to 32 rows of x, two sets of 16 if Both, by 32 rows of weights over `blocks`; c (+)= the products.
// x: the first row's high parts, at the first of the blocks; their low parts are `low` dwords behind them. ldx: from row to row.
// c: (rows, kBand), ldc from row to row.
template <class Tiles, bool Both>
inline void tile(const float* x, int64_t ldx, int64_t low, const Unpacked& w, int64_t blocks, bool add_to, float* c, int64_t ldc) {
  const int64_t second = kTileSide * ldx, below = kTileSide * ldc;
  Tiles::template clear<0>();
  Tiles::template clear<1>();
  Tiles::template clear<2>();
  Tiles::template clear<3>();
  if (add_to) {
    Tiles::template load<0>(c, ldc);
    Tiles::template load<1>(c + kTileSide, ldc);
    if constexpr (Both) {
      Tiles::template load<2>(c + below, ldc);
      Tiles::template load<3>(c + below + kTileSide, ldc);
    }
  }
  const auto rows = [&](const float* from) {
    Tiles::template load<4>(from, ldx);
    if constexpr (Both) Tiles::template load<5>(from + second, ldx);
  };
  const auto weights = [](const float (*parts)[kTileFloats]) {
    Tiles::template load<6>(parts[0], kTileSide);
    Tiles::template load<7>(parts[1], kTileSide);
  };
  const auto meet = [] {
    Tiles::template dot<0, 4, 6>();
    Tiles::template dot<1, 4, 7>();
    if constexpr (Both) {
      Tiles::template dot<2, 5, 6>();
      Tiles::template dot<3, 5, 7>();
    }
  };
  // high x by low w, high by high, low by high; tiles are loaded in the order in which one serves two products.
  for (int64_t b = 0; b < blocks; ++b, x += kTileSide) {
    rows(x);
    weights(w.blocks[b] + 2);
    meet();
    weights(w.blocks[b]);
    meet();
    rows(x + low);
    meet();
  }
  Tiles::template store<0>(c, ldc);
  Tiles::template store<1>(c + kTileSide, ldc);
  if constexpr (Both) {
    Tiles::template store<2>(c + below, ldc);
    Tiles::template store<3>(c + below + kTileSide, ldc);
  }
}

// Weight rows [begin, end) of a band; `y` has the product of the first activation row with the first of them.
struct Part {
  int64_t band, begin, end;
  float* y;
};

// Products over a slab, `blocks` of kBlock values from `k` on, for all rows of x: the first slab (k = 0) sets y, others add to it.
template <class Tiles>
inline void multiply_slab(const Matrix& w, const float* x, int64_t ldx, int64_t batch, int64_t k, int64_t blocks, const Unpacked& slab,
                          const Part& part, int64_t ldy) {
  constexpr int64_t kRows = 2 * kTileSide;
  const bool whole = part.end - part.begin == kBand;
  alignas(64) float own[kRows][kBand];  // sums of a band of which y has a part
  int64_t configured = 0;
  for (int64_t m = 0; m < batch; m += kRows) {
    const int64_t here = batch - m < kRows ? batch - m : kRows, second = here - kTileSide;
    // A part without rows is not used, but a tile cannot have none: it gets one.
    if (here != configured) Tiles::begin(second > 0 ? kTileSide : here, second > 0 ? second : 1);
    configured = here;
    float* c = whole ? part.y + m * ldy : own[0];
    const int64_t ldc = whole ? ldy : kBand, width = part.end - part.begin, at = part.begin - part.band * kBand;
    if (!whole && k != 0) {
      for (int64_t i = 0; i < here; ++i) std::memcpy(&own[i][at], part.y + (m + i) * ldy, static_cast<size_t>(width) * sizeof(float));
    }
    const float* rows = x + m * ldx + k / 2;
    second > 0 ? tile<Tiles, true>(rows, ldx, w.k / 2, slab, blocks, k != 0, c, ldc)
               : tile<Tiles, false>(rows, ldx, w.k / 2, slab, blocks, k != 0, c, ldc);
    if (whole) continue;
    for (int64_t i = 0; i < here; ++i) std::memcpy(part.y + (m + i) * ldy, &own[i][at], static_cast<size_t>(width) * sizeof(float));
  }
}

template <class Tiles>
void multiply_tiles(const Matrix& w, const float* x, int64_t ldx, int64_t batch, int64_t row, int64_t rows, float* y, int64_t ldy) {
  Unpacked slab;
  const auto unpack = [&](int64_t band, int64_t k, int64_t end) {
    with_integers(w, [&]<class F>(F) {
      with_scales<F>(w, [&](auto type) { unpack_slab<F, decltype(type)::value>(w, band, k, end, slab); });
    });
  };
  for (int64_t band = row / kBand; band * kBand < row + rows; ++band) {
    const int64_t start = band * kBand, begin = row > start ? row : start, end = row + rows < start + kBand ? row + rows : start + kBand;
    for (int64_t k = 0; k < w.k; k += kSlab) {
      const int64_t to = w.k - k < kSlab ? w.k : k + kSlab;
      unpack(band, k, to);
      multiply_slab<Tiles>(w, x, ldx, batch, k, (to - k) / kBlock, slab, {band, begin, end, y + begin - row}, ldy);
    }
  }
  Tiles::end();
}

void multiply_amx(const Matrix& w, const float* x, int64_t ldx, int64_t batch, int64_t row, int64_t rows, float* y, int64_t ldy) {
  multiply_tiles<Amx>(w, x, ldx, batch, row, rows, y, ldy);
}

void multiply_emulated(const Matrix& w, const float* x, int64_t ldx, int64_t batch, int64_t row, int64_t rows, float* y,
                       int64_t ldy) {
  multiply_tiles<EmulatedAmx>(w, x, ldx, batch, row, rows, y, ldy);
}

}  // namespace headrace::HEADRACE_ISA
