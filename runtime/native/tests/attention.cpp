// Attention against a plain softmax in double precision: grouped heads, windows, caps, head norms, rotation, and what
// it leaves in the cache. Up to four new tokens take one way through the code, more another.
#include <cmath>

#include "../core/attend.h"
#include "checks.h"

namespace headrace::tests {
namespace {

struct Case {
  int64_t batch = 1, length = 1, heads = 6, kv_heads = 2, dim = 48, offset = 0, window = 0, spare = 0;
  Type type = Type::f16;
  float softcap = 0;
  bool norms = false;
  int64_t rotated = 0;
};

// A head as it should be attended with: normalised and rotated, if the case asks for it.
std::vector<double> placed(const Case& c, const float* head, const std::vector<float>& norm, int64_t position) {
  std::vector<double> out(head, head + c.dim);
  if (c.norms) {
    double squares = 0;
    for (const double v : out) squares += v * v;
    const double factor = 1 / std::sqrt(squares / static_cast<double>(c.dim) + 1e-6);
    for (int64_t d = 0; d < c.dim; ++d) out[d] *= factor * norm[d];
  }
  for (int64_t i = 0; i < c.rotated / 2; ++i) {
    const float angle = static_cast<float>(position) * (1.0f / static_cast<float>(i + 1));  // rounded as rope.cpp does
    const double a = out[i], b = out[i + c.rotated / 2];
    out[i] = a * std::cos(double{angle}) - b * std::sin(double{angle});
    out[i + c.rotated / 2] = b * std::cos(double{angle}) + a * std::sin(double{angle});
  }
  return out;
}

void test_case(const Kernels& kernels, const Case& c) {
  const int64_t all_heads = c.heads + 2 * c.kv_heads, capacity = c.offset + c.length + c.spare;
  const int64_t entries = c.batch * c.kv_heads * capacity;
  const auto projected = random_floats(c.batch * c.length * all_heads * c.dim);
  const auto q_norms = random_floats(c.dim), k_norms = random_floats(c.dim);
  const Guarded qkv = guarded(projected), q_norm = guarded(q_norms), k_norm = guarded(k_norms);
  Guarded keys = stored(random_floats(entries * c.dim), c.type), values = stored(random_floats(entries * c.dim), c.type);
  Guarded out(c.batch * c.length * c.heads * c.dim * 4);
  std::vector<float> periods;
  for (int64_t i = 0; i < c.rotated / 2; ++i) periods.push_back(static_cast<float>(i + 1));
  Rope rope(periods, 1.0f);

  AttendCall call;
  call.qkv = qkv.as<float>();
  call.keys = keys.as();
  call.values = values.as();
  call.kv_type = c.type;
  call.batch = c.batch;
  call.length = c.length;
  call.heads = c.heads;
  call.kv_heads = c.kv_heads;
  call.dim = c.dim;
  call.capacity = capacity;
  call.offset = c.offset;
  call.norm_eps = 1e-6f;
  call.rule = {0.1f, c.softcap};
  call.window = c.window;
  call.out = out.as<float>();
  if (c.norms) {
    call.q_norm = q_norm.as<float>();
    call.k_norm = k_norm.as<float>();
  }
  if (c.rotated > 0) call.rope = &rope;
  run_attend(Pool::shared(), kernels, call);

  const double half_ulp = c.type == Type::f32 ? 2e-6 : c.type == Type::f16 ? 0x1p-11 : 0x1p-8;
  for (int64_t b = 0; b < c.batch; ++b) {
    for (int64_t t = 0; t < c.length; ++t) {
      const float* token = projected.data() + (b * c.length + t) * all_heads * c.dim;
      for (int64_t h = 0; h < c.kv_heads; ++h) {  // what was written
        const auto key = placed(c, token + (c.heads + h) * c.dim, k_norms, c.offset + t);
        const float* value = token + (c.heads + c.kv_heads + h) * c.dim;
        const int64_t at = ((b * c.kv_heads + h) * capacity + c.offset + t) * c.dim;
        for (int64_t d = 0; d < c.dim; ++d) {
          const double key_off = number(keys.as(), c.type, at + d) - key[d];
          const double value_off = number(values.as(), c.type, at + d) - static_cast<double>(value[d]);
          check(std::fabs(key_off) <= 1.01 * half_ulp * std::fabs(key[d]) + 1e-5, "stored key", kernels.name);
          check(std::fabs(value_off) <= half_ulp * std::fabs(value[d]) + 1e-7, "stored value", kernels.name);
        }
      }
      for (int64_t h = 0; h < c.heads; ++h) {
        const auto q = placed(c, token + h * c.dim, q_norms, c.offset + t);
        const int64_t base = (b * c.kv_heads + h / (c.heads / c.kv_heads)) * capacity;
        std::vector<double> expected(static_cast<size_t>(c.dim), 0.0);
        double total = 0;
        for (int64_t p = first_seen(call, c.offset + t); p <= c.offset + t; ++p) {
          double score = 0;
          for (int64_t d = 0; d < c.dim; ++d) score += q[d] * number(keys.as(), c.type, (base + p) * c.dim + d);
          score *= 0.1;
          if (c.softcap > 0) score = c.softcap * std::tanh(score / c.softcap);
          const double weight = std::exp(score);
          total += weight;
          for (int64_t d = 0; d < c.dim; ++d) {
            expected[d] += weight * number(values.as(), c.type, (base + p) * c.dim + d);
          }
        }
        const float* got = out.as<float>() + ((b * c.length + t) * c.heads + h) * c.dim;
        for (int64_t d = 0; d < c.dim; ++d) {
          if (!(std::fabs(got[d] - expected[d] / total) <= 2e-5)) return check(false, "attention", kernels.name);
        }
      }
    }
  }
}

}  // namespace

void test_attention(const Kernels& kernels) {
  constexpr Type kTypes[] = {Type::f32, Type::f16, Type::bf16};
  int turn = 0;
  for (const Type type : kTypes) {
    for (const int64_t length : {1, 2, 4, 5, 49}) {
      for (const int64_t offset : {0, 1, 127, 150}) {
        for (const int64_t window : {0, 1, 40}) {
          test_case(kernels, {.length = length, .offset = offset, .window = window, .spare = turn++ % 2, .type = type});
        }
      }
    }
  }
  for (const int64_t dim : {16, 64, 80, 128, 256}) {
    for (const int64_t kv_heads : {1, 2}) {
      for (const int64_t shared : {1, 3, 4, 7}) {
        for (const int64_t length : {1, 3, 9}) {
          test_case(kernels, {.batch = 2,
                              .length = length,
                              .heads = kv_heads * shared,
                              .kv_heads = kv_heads,
                              .dim = dim,
                              .offset = 70,
                              .spare = 3,
                              .type = kTypes[turn++ % 3],
                              .softcap = turn % 2 == 0 ? 0.0f : 5.0f,
                              .norms = turn % 3 == 0,
                              .rotated = turn % 4 == 0 ? dim / 2 : dim});
        }
      }
    }
  }
  // Long enough for every thread to have several stretches.
  for (const int64_t length : {1, 100}) test_case(kernels, {.length = length, .offset = 1500, .rotated = 48});
}

}  // namespace headrace::tests
