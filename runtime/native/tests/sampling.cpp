// Drawing a token, against a sort of everything: what may be drawn, and at which share of the way each begins and ends.
#include "../core/sample.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "checks.h"

namespace headrace::tests {
namespace {

constexpr double kSlack = 1e-5;  // of the whole: sums are taken in float32

struct Shares {
  std::vector<int64_t> kept;    // in the order of the vocabulary
  std::vector<double> weights;  // of all
  bool open = false;            // a cut so near to a token's border that float32 may see it elsewhere
};

// The tokens that a rule keeps, with weights of all, by a sort of all logits.
Shares shares(const std::vector<float>& logits, const SampleRule& rule) {
  const auto n = static_cast<int64_t>(logits.size());
  std::vector<float> x(logits);
  for (float& value : x) value /= rule.temperature;
  const double top = *std::max_element(x.begin(), x.end());
  Shares out;
  for (const float value : x) out.weights.push_back(value - top > -87 ? std::exp(value - top) : 0);
  std::vector<int64_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return x[a] > x[b]; });
  if (rule.top_k > 0 && rule.top_k < n) order.resize(static_cast<size_t>(rule.top_k));
  if (rule.top_p < 1) {
    double total = 0, before = 0;
    for (const int64_t i : order) total += out.weights[i];
    size_t kept = 0;
    while (kept < order.size() && before < rule.top_p * total) {
      before += out.weights[order[kept++]];
      out.open = out.open || std::abs(before - rule.top_p * total) < kSlack * total;
    }
    order.resize(kept);
  }
  if (rule.min_p > 0) {
    const double least = top + std::log(rule.min_p);
    for (const int64_t i : order) out.open = out.open || std::abs(x[i] - least) < kSlack;
    std::erase_if(order, [&](int64_t i) { return x[i] < least; });
  }
  std::sort(order.begin(), order.end());
  out.kept = order;
  return out;
}

// 20 draws at even shares of the whole: each token lies where its share begins and ends in vocabulary order.
void test_rule(const Kernels& kernels, const std::vector<float>& logits, const SampleRule& rule) {
  const Shares expected = shares(logits, rule);
  if (expected.open) return;
  double total = 0;
  for (const int64_t i : expected.kept) total += expected.weights[i];
  const Guarded row = guarded(logits);
  for (int i = 0; i < 20; ++i) {
    const double share = i / 20.0 + 0.01;
    const auto random = static_cast<uint64_t>(share * 0x1p64);
    const int64_t token = sample(kernels, row.as<float>(), static_cast<int64_t>(logits.size()), rule, random);
    double begin = 0;
    bool allowed = false;
    for (const int64_t k : expected.kept) {
      if (k == token) {
        allowed = begin / total <= share + kSlack && share <= (begin + expected.weights[k]) / total + kSlack;
        break;
      }
      begin += expected.weights[k];
    }
    check(allowed, "a drawn token", kernels.name);
  }
}

}  // namespace

void test_sampling(const Kernels& kernels) {
  constexpr float kNever = -std::numeric_limits<float>::infinity();
  for (const int64_t n : {1, 2, 15, 16, 17, 300, 1024, 5003}) {
    for (int form = 0; form < 5; ++form) {
      std::vector<float> logits = random_floats(n);
      for (size_t i = 0; i < logits.size(); ++i) {
        if (form == 1) logits[i] = std::round(logits[i] * 4);  // many equals
        if (form == 2) logits[i] *= 30;
        if (form == 3 && i % 3 != 0) logits[i] = kNever;
        if (form == 4) logits[i] = 1;
      }
      for (const float temperature : {1.0f, 0.3f, 2.5f}) {
        test_rule(kernels, logits, {.temperature = temperature});
        for (const double p : {1e-30, 0.3, 0.9, 0.999}) test_rule(kernels, logits, {.temperature = temperature, .top_p = p});
        for (const int64_t k : {1, 7, 40, 400, 5000}) test_rule(kernels, logits, {.temperature = temperature, .top_k = k});
        test_rule(kernels, logits, {.temperature = temperature, .min_p = 0.1f});
        test_rule(kernels, logits, {.temperature = temperature, .top_k = 50, .top_p = 0.8, .min_p = 0.02f});
      }
      const auto best = std::max_element(logits.begin(), logits.end()) - logits.begin();
      const Guarded row = guarded(logits);
      check(likeliest(kernels, row.as<float>(), n) == static_cast<uint32_t>(best), "the likeliest token", kernels.name);
    }
  }
  // Sums of the largest finite numbers would be infinite, of both signs NaN.
  std::vector<float> large(3000);
  for (size_t i = 0; i < large.size(); ++i) large[i] = i % 4 < 2 ? 3e38f : -3e38f;
  large[2500] = 3.1e38f;
  check(likeliest(kernels, large.data(), 3000) == 2500, "the likeliest of large logits", kernels.name);
  check(sample(kernels, large.data(), 3000, {.top_p = 0.5}, ~uint64_t{0}) == 2500, "a drawn one of large logits", kernels.name);
  // Nothing to draw from ends at some token, never beyond the row.
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  for (const float value : {kNan, kNever, -kNever}) {
    std::vector<float> logits(37, value);
    check(sample(kernels, logits.data(), 37, {.top_k = 5, .top_p = 0.5}, ~uint64_t{0}) < 37, "odd logits", kernels.name);
    logits.assign(37, -1);
    logits[20] = value;
    const uint32_t token = sample(kernels, logits.data(), 37, {.top_p = 0.5}, ~uint64_t{0});
    check(token < 37 && (value < 0 ? token != 20 : token == 20), "one odd logit", kernels.name);
    check(value < 0 || likeliest(kernels, logits.data(), 37) == 20, "the likeliest is the odd logit", kernels.name);
    std::vector<float> many(3000, -1);  // several blocks
    many[2500] = value;
    const uint32_t expected = value < 0 ? 0 : 2500;
    check(likeliest(kernels, many.data(), 3000) == expected, "an odd logit of a later block", kernels.name);
  }
}

}  // namespace headrace::tests
