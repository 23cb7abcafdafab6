// Projections: every storage format by every number of activation rows, odd sizes, every epilogue, low-rank products, two callers at once;
// exact, and with activations in 16 bits, in 8, in halves, and in two of them by turns, where that differs.
#include <algorithm>
#include <cmath>
#include <thread>

#include "../core/embed.h"
#include "../core/linear.h"
#include "checks.h"
#include "weights.h"

namespace headrace::tests {
namespace {

constexpr double kBound = 2e-6;  // of the sum of absolute products

// Rounding of activations: none unless `rounds`.
struct Rounding {
  bool rounds = false;
  int bits = 16;  // of every row, or, if `mixed`, of some; others have 16
  bool mixed = false;
};

struct Epilogue {
  bool norm = false, bias = false, residual = false;
  Act act = Act::none;
};

// `rows` random rows times w, against sums of doubles within the bound of the rounding.
void test_projection(const Kernels& kernels, const Weights& w, int64_t rows, const Epilogue& epilogue, Rounding kind) {
  const int64_t n = w.view.n, k = w.view.k, width = gates(epilogue.act) ? n / 2 : n;
  auto values = random_floats(rows * k);
  const auto norms = random_floats(k), biases = random_floats(n), residuals = random_floats(rows * width);
  const Guarded x = guarded(values), norm = guarded(norms), bias = guarded(biases), residual = guarded(residuals);
  Guarded out(rows * width * 4);
  LinearCall call;
  call.x = x.as<float>();
  call.rows = rows;
  call.w = kind.rounds ? w.rounded : w.view;
  call.rounding = kind.bits;
  std::vector<uint8_t> prompts(static_cast<size_t>(rows));
  for (size_t m = 0; m < prompts.size(); ++m) prompts[m] = kind.bits != 16 && (!kind.mixed || m % 5 < 2);
  if (kind.bits != 16) call.prompts = prompts.data();
  const bool halves = kind.bits == kHalves && call.w.fits_tiles();
  call.eps = 1e-5f;
  call.act = epilogue.act;
  call.curve = {0.9f, 1.2f, 0.5f, -1e-6f};
  call.out = out.as<float>();
  if (epilogue.norm) call.norm = norm.as<float>();
  if (epilogue.bias) call.w.bias = bias.as<float>();
  if (epilogue.residual) call.residual = residual.as<float>();
  run_linear(Pool::shared(), kernels, call);

  std::vector<double> row(static_cast<size_t>(k));
  std::vector<double> sums(static_cast<size_t>(n)), scales(static_cast<size_t>(n)), slack(static_cast<size_t>(n));
  std::vector<double> rounding(static_cast<size_t>(k));  // the most a value may be moved
  for (int64_t m = 0; m < rows; ++m) {
    double squares = 0;
    for (int64_t i = 0; i < k; ++i) squares += static_cast<double>(values[m * k + i]) * values[m * k + i];
    const double factor = 1 / std::sqrt(squares / static_cast<double>(k) + 1e-5);
    for (int64_t i = 0; i < k; ++i) row[i] = values[m * k + i] * (epilogue.norm ? factor * norms[i] : 1.0);
    if (call.w.rounds()) {
      const bool eight = kind.bits == 8 && prompts[m] != 0 && call.w.rounds_otherwise();
      const int64_t group = eight ? std::min(w.view.group, 32) : w.view.group;
      for (int64_t i = 0; i < k; i += group) {
        double largest = 0;
        for (int64_t j = i; j < i + group; ++j) largest = std::max(largest, std::fabs(row[j]));
        for (int64_t j = i; j < i + group; ++j) rounding[j] = largest / (eight ? 253.9 : 65534);
        if (!halves || prompts[m] == 0) continue;
        for (int64_t j = i; j < i + group; ++j) rounding[j] = std::fabs(row[j]) / 32768;  // two rounded factors, one product left out
      }
    }
    for (int64_t r = 0; r < n; ++r) {
      slack[r] = 0;
      sums[r] = epilogue.bias ? biases[r] : 0.0;
      scales[r] = std::fabs(sums[r]);
      for (int64_t i = 0; i < k; ++i) {
        const double product = w.full[r * k + i] * row[i];
        sums[r] += product;
        scales[r] += std::fabs(product);
        slack[r] += std::fabs(w.full[r * k + i]) * rounding[i];
      }
    }
    for (int64_t r = 0; r < width; ++r) {
      double expected = sums[r], scale = scales[r], moved = slack[r];
      if (epilogue.act == Act::squared) {
        const double positive = std::max(expected, 0.0), before = kBound * scale + moved;
        scale = expected = positive * positive;
        moved = (2 * positive + before) * before;
      } else if (epilogue.act == Act::xielu) {
        const double x = expected, before = kBound * scale + moved, steepest = 2.2 * std::fabs(x) + 2 * before + 2;
        expected = xielu(x, call.curve);
        scale = steepest * scale + std::fabs(expected);
        moved *= steepest;
      } else if (epilogue.act != Act::none) {
        expected = gated(sums[r], sums[width + r], epilogue.act);
        const double up = std::fabs(sums[width + r]) + (epilogue.act == Act::clamped ? 1 : 0);
        // 1.2: the steepest that any gate gets.
        scale = 1.2 * (scales[r] * up + scales[width + r] * std::fabs(sums[r])) + std::fabs(expected);
        moved = 1.2 * (slack[r] * (up + slack[width + r]) + std::fabs(sums[r]) * slack[width + r]);
      } else if (epilogue.residual) {
        expected += residuals[m * width + r];
        scale += std::fabs(residuals[m * width + r]);
      }
      const double off = std::fabs(out.as<float>()[m * width + r] - expected);
      if (!(off <= kBound * scale + moved + 1e-30)) return check(false, "projection", kernels.name);
    }
  }
}

void test_projection(const Kernels& kernels, const Weights& w, int64_t rows, const Epilogue& epilogue = {}) {
  test_projection(kernels, w, rows, epilogue, Rounding());
  if (!w.rounded.rounds()) return;
  for (const int bits : {16, 8, kHalves}) {
    if (bits == kHalves && kernels.multiply_tiles == nullptr) continue;
    for (const bool mixed : {false, true}) test_projection(kernels, w, rows, epilogue, {true, bits, mixed});
  }
}

// The layout by its definition, for rows and columns that fill no square of interleave().
template <class T>
void test_interleaving() {
  for (const int64_t rows : {1, 13, 32, 51, 96}) {
    for (const int64_t columns : {1, 3, 16, 18, 67, 131}) {
      const Guarded from = random_bytes(rows * columns * static_cast<int64_t>(sizeof(T)));
      Guarded to(bands(rows) * kBand * columns * static_cast<int64_t>(sizeof(T)));
      interleave(Pool::shared(), from.as<T>(), rows, columns, to.as<T>());
      for (int64_t row = 0; row < bands(rows) * kBand; ++row) {
        for (int64_t c = 0; c < columns; ++c) {
          const T expected = row < rows ? from.as<T>()[row * columns + c] : T{0};
          const int64_t at = (row / kBand * columns + c) * kBand + row % kBand;
          check(to.as<T>()[at] == expected, "a number's place", "interleaving");
        }
      }
    }
  }
}

// Every row, and rows that no matrix has.
void test_embedding(const Weights& w) {
  const int64_t n = w.view.n, k = w.view.k;
  std::vector<uint32_t> tokens{static_cast<uint32_t>(n), static_cast<uint32_t>(-1)};
  for (int64_t r = 0; r < n; ++r) tokens.push_back(static_cast<uint32_t>(r));
  for (const Matrix& view : {w.view, w.rounded}) {
    Guarded out((n + 2) * k * 4);
    run_embed(view, tokens.data(), n + 2, out.as<float>());
    const float* values = out.as<float>();
    for (int64_t i = 0; i < 2 * k; ++i) check(std::isnan(values[i]), "no such row", "embedding");
    for (int64_t i = 0; i < n * k; ++i) {
      check(std::fabs(values[2 * k + i] - w.full[i]) <= 1e-4 * (1 + std::fabs(w.full[i])), "row", "embedding");
    }
  }
}

// Every format and type; the numbers of rows from 1 to 16 have kernels of their own, 17 and more have panels.
void test_formats(const Kernels& kernels) {
  std::vector<Format> formats(std::begin(kOtherFormats), std::end(kOtherFormats));
  for (const Type type : kTypes) {
    formats.push_back({0, 0, type});
    for (const int bits : {2, 3, 4, 5, 6, 8}) {
      for (const int group : {32, 64, 128}) formats.push_back({bits, group, type});
    }
  }
  for (const Format& format : formats) {
    const Weights w(13, format.bits == 0 ? 149 : 3 * format.group, format);
    test_embedding(w);
    for (int64_t rows = 1; rows <= 18; ++rows) test_projection(kernels, w, rows);
  }
}

// Rows and groups that fill no vector, tile, slab, panel or task; up to several tasks for every thread.
void test_sizes(const Kernels& kernels) {
  int turn = 0;
  for (const int64_t n : {1, 2, 3, 67, 300}) {
    for (const int64_t groups : {1, 2, 17, 35}) {
      std::vector<Format> formats(std::begin(kOtherFormats), std::end(kOtherFormats));
      for (const int bits : {0, 4, 5, 8}) formats.push_back({bits, bits == 0 ? 0 : 32, kTypes[turn++ % 3]});
      for (const Format& format : formats) {
        const int64_t k = format.bits == 0 ? groups * 32 - 1 : groups * format.group;
        const Weights w(n, k, format);
        for (const int64_t rows : {1, 2, 8, 9, 16, 17}) {
          if (n * k * rows < 1 << 19) test_projection(kernels, w, rows);
        }
      }
    }
  }
  const Weights tall(70, 288, {4, 32, Type::f16});
  for (const int64_t rows : {97, 520}) test_projection(kernels, tall, rows);
  for (const int bits : {2, 4, 5, 6, 8}) {  // more values of k than any kernel takes at once
    const Weights wide(35, 3328, {bits, 128, Type::f16});
    for (const int64_t rows : {1, 3}) test_projection(kernels, wide, rows);
  }
  for (const Format& format : kOtherFormats) {
    const Weights wide(35, 3328, format);
    for (const int64_t rows : {1, 3, 40}) test_projection(kernels, wide, rows);
  }
}

void test_epilogues(const Kernels& kernels) {
  for (const int bits : {0, 4}) {
    const Weights w(150, 192, {bits, bits == 0 ? 0 : 64, Type::f16});
    for (const int64_t rows : {1, 7, 40}) {
      for (const bool norm : {false, true}) {
        for (const bool bias : {false, true}) {
          test_projection(kernels, w, rows, {norm, bias, true, Act::none});
          for (const Act act : {Act::silu, Act::gelu, Act::clamped, Act::squared, Act::xielu}) {
            test_projection(kernels, w, rows, {norm, bias, false, act});
          }
        }
      }
    }
  }
}

// Low-rank products of parts of a matrix, which begin and end anywhere, beside the same call without them.
void test_low_rank(const Kernels& kernels, const Format& format, Type type, int64_t rank, int64_t rows) {
  const Weights w(300, 256, format);
  const int64_t n = w.view.n, k = w.view.k, ranks = 2 * rank + 1;
  const auto values = random_floats(rows * k), norms = random_floats(k), scaling = random_floats(ranks);
  const Guarded x = guarded(values), norm = guarded(norms), scales = guarded(scaling), a = stored(random_floats(ranks * k), type);
  Factor factors[] = {{nullptr, type, 5, 67, 0, rank}, {nullptr, type, 96, 128, rank, 1}, {nullptr, type, 200, 100, rank + 1, rank}};
  std::vector<Guarded> plain, interleaved;
  for (Factor& b : factors) {
    plain.push_back(stored(random_floats(b.rows * b.rank), type));
    interleaved.emplace_back(bands(b.rows) * kBand * b.rank * size_of(type));
    if (size_of(type) == 2) {
      interleave(Pool::shared(), plain.back().as<uint16_t>(), b.rows, b.rank, interleaved.back().as<uint16_t>());
    } else {
      interleave(Pool::shared(), plain.back().as<uint32_t>(), b.rows, b.rank, interleaved.back().as<uint32_t>());
    }
    b.data = interleaved.back().as();
  }
  LowRank low_rank;
  low_rank.a.data = a.as();
  low_rank.a.n = ranks;
  low_rank.a.k = k;
  low_rank.a.type = type;
  low_rank.scales = scales.as<float>();
  low_rank.factors = factors;
  low_rank.count = 3;

  LinearCall call;
  call.x = x.as<float>();
  call.rows = rows;
  call.norm = norm.as<float>();
  call.eps = 1e-5f;
  call.w = w.rounded;
  Guarded without(rows * n * 4), with(rows * n * 4);
  call.out = without.as<float>();
  run_linear(Pool::shared(), kernels, call);
  call.w.low_rank = &low_rank;
  call.out = with.as<float>();
  run_linear(Pool::shared(), kernels, call);

  std::vector<double> t(static_cast<size_t>(ranks)), sizes(static_cast<size_t>(ranks));
  for (int64_t m = 0; m < rows; ++m) {
    double squares = 0;
    for (int64_t i = 0; i < k; ++i) squares += static_cast<double>(values[m * k + i]) * values[m * k + i];
    const double factor = 1 / std::sqrt(squares / static_cast<double>(k) + 1e-5);
    for (int64_t j = 0; j < ranks; ++j) {
      t[j] = sizes[j] = 0;
      for (int64_t i = 0; i < k; ++i) {
        const double product = number(a.as(), type, j * k + i) * factor * values[m * k + i] * norms[i] * scaling[j];
        t[j] += product;
        sizes[j] += std::fabs(product);
      }
    }
    for (int64_t r = 0; r < n; ++r) {
      const double before = without.as<float>()[m * n + r];
      double expected = before, size = std::fabs(before);
      for (size_t i = 0; i < plain.size(); ++i) {
        const Factor& b = factors[i];
        for (int64_t j = 0; r >= b.row && r < b.row + b.rows && j < b.rank; ++j) {
          const double weight = number(plain[i].as(), type, (r - b.row) * b.rank + j);
          expected += weight * t[b.first + j];
          size += std::fabs(weight) * sizes[b.first + j];
        }
      }
      const double off = std::fabs(with.as<float>()[m * n + r] - expected);
      if (!(off <= kBound * size)) return check(false, "low-rank product", kernels.name);
    }
  }
}

void test_low_rank(const Kernels& kernels) {
  for (const Type type : kTypes) {
    for (const int64_t rank : {1, 8, 64}) {
      for (const int64_t rows : {1, 3, 40}) {
        for (const int bits : {0, 4}) test_low_rank(kernels, {bits, bits == 0 ? 0 : 32, Type::f16}, type, rank, rows);
      }
    }
  }
}

// Two engines: each must get the answers it gets alone, whoever of them has the pool.
void test_two_callers(const Kernels& kernels) {
  const Weights wide(600, 512, {8, 64, Type::f16});
  const auto x = random_floats(20 * wide.view.k);
  auto product = [&](int64_t rows) {
    std::vector<float> out(static_cast<size_t>(rows * wide.view.n));
    LinearCall call;
    call.x = x.data();
    call.rows = rows;
    call.w = wide.rounded;
    call.out = out.data();
    run_linear(Pool::shared(), kernels, call);
    return out;
  };
  auto repeat = [&](int64_t rows, const std::vector<float>& expected) {
    for (int i = 0; i < 10; ++i) check(product(rows) == expected, "two callers", kernels.name);
  };
  const auto alone_1 = product(1), alone_5 = product(5), alone_20 = product(20);
  std::thread one([&] { repeat(1, alone_1); }), batch([&] { repeat(5, alone_5); });
  repeat(20, alone_20);
  one.join();
  batch.join();
}

}  // namespace

void test_interleaving() {
  test_interleaving<uint8_t>();
  test_interleaving<uint16_t>();
  test_interleaving<uint32_t>();
}

void test_projections(const Kernels& kernels) {
  test_formats(kernels);
  test_sizes(kernels);
  test_epilogues(kernels);
  test_low_rank(kernels);
  test_two_callers(kernels);
}

}  // namespace headrace::tests
