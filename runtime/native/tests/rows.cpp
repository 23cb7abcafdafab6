// The row-wise kernels, at every length around the width of a vector, and rotation.
#include <cmath>

#include "../core/linear.h"
#include "../core/rope.h"
#include "checks.h"
#include "weights.h"

namespace headrace::tests {
namespace {

bool near(double a, double b, double scale, double bound = 2e-6) { return std::fabs(a - b) <= bound * scale + 1e-30; }

void test_norm(const Kernels& kernels, int64_t k) {
  const auto values = random_floats(3 * k), weights = random_floats(k);
  const Guarded x = guarded(values), weight = guarded(weights);
  Guarded out(3 * k * 4);
  run_rms_norm(Pool::shared(), kernels, x.as<float>(), 3, k, weight.as<float>(), 1e-5f, out.as<float>());
  for (int64_t m = 0; m < 3; ++m) {
    double squares = 0;
    for (int64_t i = 0; i < k; ++i) squares += static_cast<double>(values[m * k + i]) * values[m * k + i];
    const double factor = 1 / std::sqrt(squares / static_cast<double>(k) + 1e-5);
    for (int64_t i = 0; i < k; ++i) {
      const double expected = values[m * k + i] * factor * weights[i];
      check(near(out.as<float>()[m * k + i], expected, std::fabs(expected)), "RMS norm", kernels.name);
    }
  }
}

void test_layer_norm(const Kernels& kernels, int64_t k, bool biased) {
  auto values = random_floats(3 * k);
  for (float& value : values) value += 2;  // the mean is most of it
  const auto weights = random_floats(k), biases = random_floats(k);
  const Guarded x = guarded(values), weight = guarded(weights), bias = guarded(biases);
  Guarded out(3 * k * 4);
  run_layer_norm(Pool::shared(), kernels, x.as<float>(), 3, k, weight.as<float>(), biased ? bias.as<float>() : nullptr, 1e-5f,
                 out.as<float>());
  for (int64_t m = 0; m < 3; ++m) {
    double mean = 0, squares = 0;
    for (int64_t i = 0; i < k; ++i) mean += values[m * k + i] / static_cast<double>(k);
    for (int64_t i = 0; i < k; ++i) squares += (values[m * k + i] - mean) * (values[m * k + i] - mean);
    const double factor = 1 / std::sqrt(squares / static_cast<double>(k) + 1e-5);
    for (int64_t i = 0; i < k; ++i) {
      const double expected = (values[m * k + i] - mean) * factor * weights[i] + (biased ? biases[i] : 0.0);
      const double scale = 4 * std::fabs(factor * weights[i]) + std::fabs(expected);  // of numbers up to 4 before the mean is subtracted
      check(near(out.as<float>()[m * k + i], expected, scale), "LayerNorm", kernels.name);
    }
  }
}

void test_gate(const Kernels& kernels, int64_t n, Act act) {
  auto gates = random_floats(n);
  const auto ups = random_floats(n);
  for (float& g : gates) g *= 30;  // both tails
  const Guarded gate = guarded(gates), up = guarded(ups);
  Guarded out(n * 4);
  kernels.gated(gate.as<float>(), up.as<float>(), n, act, out.as<float>());
  for (int64_t i = 0; i < n; ++i) {
    const double g = gates[i];
    const double activated = act == Act::silu ? g / (1 + std::exp(-g))
                                         : 0.5 * g * (1 + std::tanh(0.7978845608028654 * (g + 0.044715 * g * g * g)));
    check(near(out.as<float>()[i], activated * ups[i], std::fabs(g * ups[i])), "gated unit", kernels.name);
  }
}

void test_xielu(const Kernels& kernels, int64_t n) {
  auto values = random_floats(n);
  for (int64_t i = 0; i < n; ++i) values[i] *= i % 3 == 0 ? 30.0f : i % 3 == 1 ? 0.3f : 1e-3f;  // both tails, and near 0
  Guarded x = guarded(values);
  const Curve curve{0.9f, 1.2f, 0.5f, -1e-6f};
  kernels.xielu(curve, n, x.as<float>());
  for (int64_t i = 0; i < n; ++i) {
    const double expected = xielu(values[i], curve);
    check(near(x.as<float>()[i], expected, std::fabs(values[i] * 0.5) + std::fabs(expected)), "xIELU", kernels.name);
  }
}

void test_conversion(const Kernels& kernels, int64_t n, Type type) {
  const auto values = random_floats(n);
  const Guarded from = guarded(values), expected = stored(values, type);
  Guarded half(n * size_of(type)), back(n * 4);
  kernels.from_float(from.as<float>(), n, type, half.as());
  kernels.to_float(half.as(), type, n, back.as<float>());
  check(std::memcmp(half.as(), expected.as(), static_cast<size_t>(n * size_of(type))) == 0, "stored", kernels.name);
  for (int64_t i = 0; i < n; ++i) {
    check(back.as<float>()[i] == number(expected.as(), type, i), "stored and read", kernels.name);
  }
}

void test_rotation(int64_t dims, int64_t offset) {
  std::vector<float> periods;
  for (int64_t i = 0; i < dims / 2; ++i) {
    periods.push_back(static_cast<float>(std::pow(500000.0, 2.0 * static_cast<double>(i) / static_cast<double>(dims))));
  }
  Rope rope(periods, 1.5f);
  const auto table = rope.table({{offset + 9, 1}, {offset, 3}});
  check(table == rope.table({{offset + 9, 1}, {offset, 3}}), "one table for all layers of a pass", "rope");
  for (int64_t t = 0; t < 3; ++t) {
    const auto before = random_floats(dims);
    Guarded head = guarded(before);
    rope.rotate(*table, 1 + t, head.as<float>());
    for (int64_t i = 0; i < dims / 2; ++i) {
      const double angle = static_cast<double>(offset + t) / periods[i];
      const double a = before[i], b = before[i + dims / 2], bound = 1e-6 * static_cast<double>(8 + offset + t);
      const float* after = head.as<float>();
      check(near(after[i], 1.5 * (a * std::cos(angle) - b * std::sin(angle)), 4, bound), "low half", "rope");
      check(near(after[i + dims / 2], 1.5 * (b * std::cos(angle) + a * std::sin(angle)), 4, bound), "high half", "rope");
    }
  }
}

}  // namespace

void test_rows(const Kernels& kernels) {
  for (int64_t n = 1; n <= 70; ++n) {
    test_norm(kernels, n);
    for (const bool biased : {false, true}) test_layer_norm(kernels, n, biased);
    for (const Act act : {Act::silu, Act::gelu}) test_gate(kernels, n, act);
    test_xielu(kernels, n);
    for (const Type type : {Type::f32, Type::f16, Type::bf16}) test_conversion(kernels, n, type);
  }
  test_norm(kernels, 8191);
  test_layer_norm(kernels, 8191, true);
  for (const int64_t dims : {2, 32, 64, 128}) {
    for (const int64_t offset : {0, 1, 511}) test_rotation(dims, offset);
  }
}

}  // namespace headrace::tests
