// Experts against the same sum in double precision: every format, few and many tokens, what fills no band, every rule; and
// that a token's answer has the same bits whatever tokens are beside it.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "../core/experts.h"
#include "checks.h"
#include "weights.h"

namespace headrace::tests {
namespace {

constexpr double kBound = 2e-6;  // of the sum of absolute products

struct Case {
  int64_t width = 64, inner = 96, experts = 5, active = 2;
  Format gate, up, down;
  bool normalized = true, biased = true;
  Act act = Act::silu;
  bool sigmoid = false, before = false;  // shares are sigmoids, and multiply the input
};

// The experts' weights and biases.
struct Layer {
  Case c;
  Weights router, gate, up, down;
  std::vector<float> norm, biases[4];
  std::vector<Guarded> held;

  explicit Layer(const Case& shape)
      : c(shape),
        router(c.experts, c.width, {0, 0, Type::f32}),
        gate(c.experts * c.inner, c.width, c.gate),
        up(c.experts * c.inner, c.width, c.up),
        down(c.experts * c.width, c.inner, c.down),
        norm(random_floats(c.width)) {
    held.push_back(guarded(norm));
    const Weights* all[] = {&router, &gate, &up, &down};
    for (int i = 0; i < 4; ++i) {
      biases[i] = random_floats(all[i]->view.n);
      if (!c.biased) std::fill(biases[i].begin(), biases[i].end(), 0.0f);
      held.push_back(guarded(biases[i]));
    }
  }

  ExpertsCall call(bool exact) const {
    ExpertsCall call;
    call.norm = held[0].as<float>();
    call.eps = 1e-5f;
    call.router = router.view;
    call.gate = exact ? gate.view : gate.rounded;
    call.up = exact ? up.view : up.rounded;
    call.down = exact ? down.view : down.rounded;
    Matrix* all[] = {&call.router, &call.gate, &call.up, &call.down};
    for (int i = 0; i < 4 && c.biased; ++i) all[i]->bias = held[static_cast<size_t>(i) + 1].as<float>();
    call.active = c.active;
    call.normalized = c.normalized;
    call.act = c.act;
    call.rule.sigmoid = c.sigmoid;
    call.rule.before = c.before;
    return call;
  }
};

// Numbers, and how far from them what the kernels have may be.
struct Numbers {
  std::vector<double> value, off;

  explicit Numbers(int64_t n) : value(static_cast<size_t>(n)), off(static_cast<size_t>(n)) {}

  // As they meet `w`, which may round them: a group shares a scale, its largest magnitude / 32767, so a number moves by half of that.
  Numbers met(const Matrix& w) const {
    Numbers out = *this;
    if (!w.rounds()) return out;
    for (size_t i = 0; i < value.size(); i += static_cast<size_t>(w.group)) {
      double largest = 0;
      const size_t end = i + static_cast<size_t>(w.group);
      for (size_t j = i; j < end; ++j) largest = std::max(largest, std::fabs(value[j]) + off[j]);
      for (size_t j = i; j < end; ++j) out.off[j] += largest / 65534;
    }
    return out;
  }
};

// Row `row` of w times x, plus the bias.
struct Product {
  double value, off;

  Product(const Weights& w, int64_t row, const Numbers& x, float bias) : value(bias), off(kBound * std::fabs(bias)) {
    const double* weights = w.full.data() + row * w.view.k;
    for (size_t i = 0; i < x.value.size(); ++i) {
      value += weights[i] * x.value[i];
      off += std::fabs(weights[i]) * (kBound * std::fabs(x.value[i]) + x.off[i]);
    }
  }
  // Of `share` times x.
  void share(double share, float bias) {
    const double scaled = share * (value - bias);
    value = scaled + bias;
    off = off * (share + 1) + 20 * kBound * std::fabs(scaled);  // and of the share
  }
};

// What one token x (E) should become.
Numbers expected(const Layer& layer, const ExpertsCall& call, const float* x) {
  const Case& c = layer.c;
  double squares = 0;
  for (int64_t i = 0; i < c.width; ++i) squares += static_cast<double>(x[i]) * x[i];
  const double factor = 1 / std::sqrt(squares / static_cast<double>(c.width) + 1e-5);
  Numbers h(c.width), inner(c.inner), out(c.width);
  for (int64_t i = 0; i < c.width; ++i) h.value[i] = x[i] * factor * layer.norm[i];
  std::vector<double> logits;
  for (int64_t e = 0; e < c.experts; ++e) logits.push_back(Product(layer.router, e, h, layer.biases[0][e]).value);
  std::vector<int64_t> order(static_cast<size_t>(c.experts));
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return logits[a] > logits[b]; });
  double total = 0;
  for (int64_t k = 0; k < (c.normalized ? c.active : c.experts); ++k) total += std::exp(logits[order[k]]);
  for (int64_t r = 0; r < c.width; ++r) {
    out.value[r] = x[r];
    out.off[r] = kBound * std::fabs(x[r]);
  }
  const Numbers for_gate = h.met(call.gate), for_up = h.met(call.up);
  for (int64_t k = 0; k < c.active; ++k) {
    const int64_t e = order[k];
    const double score = c.sigmoid ? 1 / (1 + std::exp(-logits[e])) : std::exp(logits[e]) / total;
    const double share = c.before ? 1 : score;
    for (int64_t i = 0; i < c.inner; ++i) {
      const int64_t row = e * c.inner + i;
      Product g(layer.gate, row, for_gate, layer.biases[1][row]), u(layer.up, row, for_up, layer.biases[2][row]);
      if (c.before) {
        g.share(score, layer.biases[1][row]);
        u.share(score, layer.biases[2][row]);
      }
      const double up = std::fabs(u.value) + (c.act == Act::clamped ? 1 : 0);
      inner.value[i] = gated(g.value, u.value, c.act);
      // 1.2: the steepest that any gate gets.
      inner.off[i] = 1.2 * (g.off * (up + u.off) + u.off * std::fabs(g.value)) + kBound * std::fabs(inner.value[i]);
    }
    const Numbers turned = inner.met(call.down);
    for (int64_t r = 0; r < c.width; ++r) {
      const Product answer(layer.down, e * c.width + r, turned, layer.biases[3][e * c.width + r]);
      out.value[r] += share * answer.value;
      out.off[r] += share * (answer.off + 2 * kBound * std::fabs(answer.value));  // and of the share
    }
  }
  return out;
}

// Tokens together against the oracle; each alone, against the same bits; and all in place.
void test_tokens(const Kernels& kernels, const Layer& layer, int64_t tokens, bool exact) {
  const int64_t width = layer.c.width;
  const auto values = random_floats(tokens * width);
  Guarded x = guarded(values), out(tokens * width * 4), alone(width * 4);
  ExpertsCall call = layer.call(exact);
  LinearCall next;
  next.w = call.gate;
  call.x = x.as<float>();
  call.rows = tokens;
  call.out = out.as<float>();
  call.next = &next;
  run_experts(Pool::shared(), kernels, call);

  for (int64_t m = 0; m < tokens; ++m) {
    if (tokens > 200 && m % 97 != 0) continue;
    const Numbers wanted = expected(layer, call, values.data() + m * width);
    const float* got = out.as<float>() + m * width;
    for (int64_t r = 0; r < width; ++r) {
      if (!(std::fabs(got[r] - wanted.value[r]) <= wanted.off[r])) return check(false, "experts", kernels.name);
    }
    if (exact) continue;
    ExpertsCall one = call;
    one.x = x.as<float>() + m * width;
    one.rows = 1;
    one.out = alone.as<float>();
    run_experts(Pool::shared(), kernels, one);
    if (!call.gate.rounds() || !call.up.rounds() || !call.down.rounds()) continue;
    if (std::memcmp(got, alone.as(), static_cast<size_t>(width) * 4) != 0) {
      return check(false, "a token's bits beside others", kernels.name);
    }
  }
  call.out = x.as<float>();
  run_experts(Pool::shared(), kernels, call);
  check(std::memcmp(x.as(), out.as(), static_cast<size_t>(tokens * width) * 4) == 0, "experts in place", kernels.name);
}

void test_layer(const Kernels& kernels, const Case& c, std::initializer_list<int64_t> tokens) {
  const Layer layer(c);
  for (const int64_t count : tokens) {
    test_tokens(kernels, layer, count, true);
    test_tokens(kernels, layer, count, false);
  }
}

}  // namespace

void test_experts(const Kernels& kernels) {
  std::vector<Format> formats(std::begin(kOtherFormats), std::end(kOtherFormats));
  for (const int bits : {0, 2, 3, 4, 8}) formats.push_back({bits, bits == 0 ? 0 : 32, kTypes[bits % 3]});
  int turn = 0;
  for (const Format& format : formats) {
    const Act act = turn % 3 == 0 ? Act::clamped : turn % 3 == 1 ? Act::silu : Act::gelu;
    Case c{.gate = format, .up = format, .down = format, .normalized = turn % 2 == 0, .biased = turn % 4 < 2, .act = act};
    ++turn;
    test_layer(kernels, c, {1, 2, 9, 50});
    if (format.bits == 0) continue;
    c.down = {0, 0, Type::f16};
    c.inner = 41;  // an expert begins and ends inside a band
    test_layer(kernels, c, {1, 7});
    c.gate = c.up = {0, 0, Type::bf16};
    c.down = format;
    c.width = 50;
    c.inner = 64;
    test_layer(kernels, c, {1, 7});
  }
  const Format four{4, 32, Type::f16}, eight{8, 32, Type::f16}, fp4 = kOtherFormats[0];
  test_layer(kernels, {.gate = four, .up = eight, .down = fp4}, {1, 11});  // three formats
  test_layer(kernels, {.active = 5, .gate = fp4, .up = fp4, .down = fp4}, {1, 3});
  test_layer(kernels, {.experts = 1, .active = 1, .gate = four, .up = four, .down = four}, {1, 3});
  test_layer(kernels, {.experts = 2, .active = 1, .gate = fp4, .up = fp4, .down = fp4}, {150});  // more than share a band
  for (const int bits : {0, 4}) {
    const Format format{bits, bits == 0 ? 0 : 32, Type::f16};
    Case c{.gate = format, .up = format, .down = format, .normalized = false, .sigmoid = true, .before = true};
    for (c.active = 1; c.active < 3; ++c.active) test_layer(kernels, c, {1, 5, 40});
  }
  // More pairs than are routed at once.
  test_layer(kernels, {.width = 32, .inner = 32, .active = 3, .gate = four, .up = four, .down = four}, {1400});
}

}  // namespace headrace::tests
