// Recurrent token mixing against the same recurrence in double precision: every kind and norm, odd sizes, several sequences; and that
// a token has the same bits however its prompt is cut. core/mixer.h has the rows, states and fields of every kind.
//
// The oracle is Sequence::token, one token at a time, with the state S of a head as (rows, dim) and t[j] the taps:
//
//   conv    x' = B * x;  y = C * (sum over j of t[j] x'[j - width + 1] + bias);  not gated: y = act(convolved x)
//   delta   q, k, v = silu(convolved), q and k of length 1, q / sqrt(D);  S = S exp(rate softplus(a + step_bias));
//           S += most_beta sigmoid(b) (v - S k) k^T;  y = norm(S q) silu(z)
//   kda     the same with a step for each column of S, and y = norm(S q) sigmoid(z)
//   ssm     step = clamp(softplus(a + step_bias));  S = S exp(rate step) + step v k^T;  y = norm((S q + skip v) silu(z))
//   scan    step = softplus(step);  S = S exp(rate step) + step x B;  y = (S C + skip x) silu(z)
//   wkv     S = S w' - (S u) (u rate)^T + v k'^T;  y = (LayerNorm(S r) + (r . bonus k') v) g, with u = removed_key k of length 1,
//           rate = sigmoid(a), k' = k (1 + (rate - 1) key_rate) and w' = exp(-exp(-1/2) sigmoid(w))
//   shift   y[h] = x + (before - x) taps[h]
#include "../core/mixer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "checks.h"

namespace headrace::tests {
namespace {

constexpr double kBound = 1e-4;  // of the largest number: the recurrence keeps what is rounded
constexpr float kEps = 1e-3f;

struct Case {
  MixerKind kind = MixerKind::delta;
  int64_t heads = 4, key_heads = 2, dim = 16, rows = 37, width = 4;
  int64_t norm_size = 0;  // 0: none
  // With what a kind may lack. conv: tap_bias, and silu if not gated; delta, kda: tap_bias, and most_beta 2 instead of 1; ssm: tap_bias and
  // skip; scan: skip; wkv: mixes_values; shift: nothing.
  bool biased = true;
  bool gated = true;  // conv only
};

// A mixer's vectors, in memory of just their size.
struct Layer {
  MixerShape shape;
  std::vector<Guarded> held;

  explicit Layer(const Case& c) {
    MixerShape& s = shape;
    s.kind = c.kind;
    s.heads = c.heads;
    s.key_heads = c.key_heads;
    s.dim = c.dim;
    s.rows = c.rows;
    s.width = c.width;
    s.gated = c.gated;
    if (!c.gated && c.biased) s.act = Act::silu;
    s.norm_size = c.norm_size;
    s.norm_each = c.norm_size == s.rows;
    s.norm_first = s.by_rule();
    if (s.by_rule() && c.biased) s.most_beta = 2.0f;
    s.eps = kEps;
    s.least_step = 0.3f;
    s.most_step = 0.9f;
    if (c.kind == MixerKind::wkv) {
      s.mixes_values = c.biased;
      const float* of_heads[5];
      for (const float*& vector : of_heads) vector = hold(random_floats(c.heads * c.dim));
      s.wkv = {of_heads[0], of_heads[1], of_heads[2], of_heads[3], of_heads[4]};
      return;
    }
    const bool scans = c.kind == MixerKind::scan;
    auto rates = random_floats(scans ? c.heads * c.dim : c.heads);
    for (float& rate : rates) rate = -std::fabs(rate);
    s.rate = hold(rates);
    if (scans) {
      if (c.biased) s.skip = hold(random_floats(c.heads));
      return;
    }
    const bool shifts = c.kind == MixerKind::shift;
    s.taps = hold(random_floats((shifts ? c.heads : c.width) * s.channels()));
    if (shifts) return;
    if (c.biased) s.tap_bias = hold(random_floats(s.channels()));
    if (c.kind == MixerKind::conv) return;
    s.step_bias = hold(random_floats(c.heads * s.head_decays()));
    if (c.kind == MixerKind::ssm && c.biased) s.skip = hold(random_floats(c.heads));
    if (c.norm_size > 0) s.norm = hold(random_floats(c.norm_size));
    if (!s.by_rule()) return;
    const float root = std::sqrt(static_cast<float>(c.dim));
    s.q_scale = hold(std::vector<float>(static_cast<size_t>(c.dim), 1.0f / static_cast<float>(c.dim)));
    s.k_scale = hold(std::vector<float>(static_cast<size_t>(c.dim), 1.0f / root));
  }

  const float* hold(const std::vector<float>& values) {
    held.push_back(guarded(values));
    return held.back().as<float>();
  }
};

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// One sequence, its state in double precision.
struct Sequence {
  const MixerShape& s;
  std::vector<double> state;

  // The inputs (C) of the last `width` tokens with this one, convolved: (C). The state's inputs move on by one.
  std::vector<double> convolved(const std::vector<double>& input) {
    const int64_t channels = s.channels(), before = s.width - 1;
    std::vector<double> out(static_cast<size_t>(channels));
    for (int64_t c = 0; c < channels; ++c) {
      double sum = s.tap_bias == nullptr ? 0.0 : s.tap_bias[c];
      for (int64_t j = 0; j < before; ++j) sum += state[j * channels + c] * s.taps[j * channels + c];
      out[c] = sum + input[c] * s.taps[before * channels + c];
      for (int64_t j = 0; j + 1 < before; ++j) state[j * channels + c] = state[(j + 1) * channels + c];
      if (before > 0) state[(before - 1) * channels + c] = input[c];
    }
    return out;
  }

  // RMSNorm of y (n) in place.
  void normalize(double* y, int64_t n, const float* weight) const {
    double squares = 0;
    for (int64_t i = 0; i < n; ++i) squares += y[i] * y[i];
    const double factor = 1 / std::sqrt(squares / static_cast<double>(n) + kEps);
    for (int64_t i = 0; i < n; ++i) y[i] *= factor * weight[i];
  }

  // scan.
  std::vector<double> scanned(const float* x) {
    const int64_t channels = s.heads, numbers = s.dim;
    const float *b = x + 3 * channels, *c = b + numbers;
    std::vector<double> y(static_cast<size_t>(channels));
    for (int64_t i = 0; i < channels; ++i) {
      const double input = x[i], gate = x[channels + i], step = std::log1p(std::exp(static_cast<double>(x[2 * channels + i])));
      y[i] = s.skip == nullptr ? 0 : s.skip[i] * input;
      for (int64_t n = 0; n < numbers; ++n) {
        double& own = state[i * numbers + n];
        own = own * std::exp(s.rate[i * numbers + n] * step) + step * input * b[n];
        y[i] += own * c[n];
      }
      y[i] *= gate * sigmoid(gate);
    }
    return y;
  }

  // wkv: what the state has for a key is replaced. `added`: k', `unit`: u, `rate` and `decay` (w') as above, all of one head.
  std::vector<double> replaced(const float* x) {
    const int64_t dim = s.dim, width = s.inner();
    std::vector<double> y(static_cast<size_t>(width)), decay(static_cast<size_t>(dim)), added = decay, unit = decay, rate = decay;
    for (int64_t from = 0; from < width; from += dim) {
      const float *r = x + from, *w = r + width, *k = w + width, *v = k + width, *a = v + width, *g = a + width;
      std::vector<double> value(v, v + dim);
      if (s.mixes_values) {
        for (int64_t d = 0; d < dim; ++d) value[d] += (g[width + d] - value[d]) * sigmoid(g[2 * width + d]);
      }
      double squares = 0, share = 0;
      for (int64_t d = 0; d < dim; ++d) {
        rate[d] = sigmoid(a[d]);
        decay[d] = std::exp(-0.606531 * sigmoid(w[d]));
        unit[d] = static_cast<double>(k[d]) * s.wkv.removed_key[from + d];
        added[d] = k[d] * (1 + (rate[d] - 1) * s.wkv.key_rate[from + d]);
        squares += unit[d] * unit[d];
        share += r[d] * added[d] * s.wkv.bonus[from + d];
      }
      for (double& value : unit) value /= std::max(std::sqrt(squares), 1e-7);
      // A row of the state for each number of v.
      for (int64_t row = 0; row < dim; ++row) {
        double* own = state.data() + (from + row) * dim;
        double seen = 0;
        for (int64_t d = 0; d < dim; ++d) seen += own[d] * unit[d];
        for (int64_t d = 0; d < dim; ++d) {
          own[d] = own[d] * decay[d] - seen * unit[d] * rate[d] + value[row] * added[d];
          y[from + row] += own[d] * r[d];
        }
      }
      // LayerNorm of the head, then the token's own value and the gate.
      double mean = 0, variance = 0;
      for (int64_t d = 0; d < dim; ++d) mean += y[from + d] / static_cast<double>(dim);
      for (int64_t d = 0; d < dim; ++d) variance += (y[from + d] - mean) * (y[from + d] - mean) / static_cast<double>(dim);
      for (int64_t d = 0; d < dim; ++d) {
        double& out = y[from + d];
        out = (out - mean) / std::sqrt(variance + kEps) * s.wkv.norm[from + d] + s.wkv.norm_bias[from + d];
        out = (out + share * value[d]) * g[d];
      }
    }
    return y;
  }

  // shift.
  std::vector<double> shifted(const float* x) {
    std::vector<double> y;
    for (int64_t i = 0; i < s.inner(); ++i) {
      const int64_t at = i % s.rows;
      y.push_back(x[at] + (state[at] - x[at]) * s.taps[i]);
    }
    state.assign(x, x + s.rows);
    return y;
  }

  // The result (inner()) of a projected row x, of any kind; the state moves on.
  std::vector<double> token(const float* x) {
    if (s.kind == MixerKind::shift) return shifted(x);
    if (s.kind == MixerKind::scan) return scanned(x);
    if (s.kind == MixerKind::wkv) return replaced(x);
    const int64_t channels = s.channels(), inner = s.inner();
    std::vector<double> input(x, x + channels), y(static_cast<size_t>(inner));
    if (!s.gated) {
      auto out = convolved(input);
      for (double& value : out) value *= s.act == Act::silu ? sigmoid(value) : 1.0;
      return out;
    }
    if (s.kind == MixerKind::conv) {
      for (int64_t c = 0; c < channels; ++c) input[c] *= x[2 * channels + c];
      const auto out = convolved(input);
      for (int64_t c = 0; c < channels; ++c) y[c] = out[c] * x[channels + c];
      return y;
    }
    auto mixed = convolved(input);
    for (double& value : mixed) value *= sigmoid(value);
    for (int64_t head = 0; head < s.heads; ++head) recur(x, mixed, head, y.data() + head * s.rows);
    const bool together = s.norm != nullptr && s.norm_size > s.rows;
    const int64_t part = s.norm == nullptr ? 0 : s.norm_size;
    for (int64_t at = 0; part > 0 && s.norm_first && at < inner; at += part) normalize(y.data() + at, part, s.norm);
    for (int64_t i = 0; i < inner; ++i) {
      const double gate = x[s.gates_at() + i];
      y[i] *= (s.kind == MixerKind::kda ? 1.0 : gate) * sigmoid(gate);
    }
    for (int64_t at = 0; part > 0 && !s.norm_first && at < inner; at += part) {
      normalize(y.data() + at, part, together ? s.norm + at : s.norm);
    }
    return y;
  }

  // delta, kda and ssm: y (rows) of one head, before norm and gate. mixed: (C) convolved and activated.
  void recur(const float* x, const std::vector<double>& mixed, int64_t head, double* y) {
    const int64_t key = head / (s.heads / s.key_heads) * s.dim;
    std::vector<double> q(mixed.begin() + key, mixed.begin() + key + s.dim), k = q;
    for (int64_t i = 0; i < s.dim; ++i) k[i] = mixed[s.key_heads * s.dim + key + i];
    const double* v = mixed.data() + 2 * s.key_heads * s.dim + head * s.rows;
    const int64_t decays = s.head_decays();
    std::vector<double> steps(static_cast<size_t>(decays));
    for (int64_t i = 0; i < decays; ++i) {
      const int64_t at = head * decays + i;
      steps[i] = std::log1p(std::exp(static_cast<double>(x[s.steps_at() + at]) + s.step_bias[at]));
    }
    double taken = steps[0], beta = 0;
    if (s.by_rule()) {
      for (auto* vector : {&q, &k}) {
        double squares = 0;
        for (const double value : *vector) squares += value * value;
        for (double& value : *vector) value /= std::sqrt(squares + 1e-6);
      }
      for (double& value : q) value /= std::sqrt(static_cast<double>(s.dim));
      beta = s.most_beta * sigmoid(x[s.betas_at() + head]);
    } else {
      taken = std::clamp<double>(taken, s.least_step, s.most_step);
      steps[0] = taken;
    }
    for (int64_t r = 0; r < s.rows; ++r) {
      double* own = state.data() + s.taps_floats() + (head * s.rows + r) * s.dim;
      double seen = 0;
      for (int64_t i = 0; i < s.dim; ++i) seen += (own[i] *= std::exp(s.rate[head] * steps[decays == 1 ? 0 : i])) * k[i];
      const double delta = s.by_rule() ? beta * (v[r] - seen) : v[r] * taken;
      y[r] = s.skip == nullptr ? 0 : v[r] * s.skip[head];
      for (int64_t i = 0; i < s.dim; ++i) y[r] += (own[i] += delta * k[i]) * q[i];
    }
  }
};

// Each number within kBound of the largest.
void compare(const float* got, const std::vector<double>& wanted, const char* what, const char* where) {
  double largest = 0;
  for (const double value : wanted) largest = std::max(largest, std::fabs(value));
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (!(std::fabs(got[i] - wanted[i]) <= kBound * largest + 1e-30)) return check(false, what, where);
  }
}

// Results of the kernels: y of all tokens and the states behind them.
struct Mixed {
  Guarded y;
  std::vector<Guarded> states;
};

// The kernels' results for sequences of `counts` rows of x each, from `states`.
Mixed run(const Kernels& kernels, const MixerShape& shape, const float* x, const std::vector<int64_t>& counts,
          const std::vector<const float*>& states) {
  int64_t tokens = 0;
  for (const int64_t count : counts) tokens += count;
  Mixed mixed{Guarded(tokens * shape.inner() * 4), {}};
  std::vector<MixerRows> rows;
  MixerCall call;
  call.shape = shape;
  call.x = x;
  for (size_t i = 0; i < counts.size(); ++i) {
    mixed.states.emplace_back(shape.state_floats() * 4);
    rows.push_back({call.tokens, counts[i], states[i], mixed.states.back().as<float>()});
    call.tokens += counts[i];
  }
  call.sequences = rows.data();
  call.count = static_cast<int64_t>(rows.size());
  call.out = mixed.y.as<float>();
  run_mixer(Pool::shared(), kernels, call);
  return mixed;
}

// All sequences in one call against the oracle; then each alone, token by token, against the same bits.
void test_case(const Kernels& kernels, const Case& c, const std::vector<int64_t>& counts) {
  const Layer layer(c);
  const MixerShape& s = layer.shape;
  int64_t tokens = 0;
  for (const int64_t count : counts) tokens += count;
  const auto values = random_floats(tokens * s.projected());
  const Guarded x = guarded(values);
  std::vector<Guarded> states;
  std::vector<const float*> before;
  for (size_t i = 0; i < counts.size(); ++i) {
    states.push_back(guarded(random_floats(s.state_floats())));
    before.push_back(states.back().as<float>());
  }
  Mixed together = run(kernels, s, x.as<float>(), counts, before);
  const float *row = values.data(), *y = together.y.as<float>();
  for (size_t i = 0; i < counts.size(); ++i) {
    Sequence sequence{s, {before[i], before[i] + s.state_floats()}};
    std::vector<double> wanted;
    for (int64_t t = 0; t < counts[i]; ++t) {
      const auto token = sequence.token(row + t * s.projected());
      wanted.insert(wanted.end(), token.begin(), token.end());
    }
    compare(y, wanted, "a mixer", kernels.name);
    compare(together.states[i].as<float>(), sequence.state, "a mixer's state", kernels.name);

    const Guarded own = guarded({row, row + counts[i] * s.projected()});
    Guarded state = guarded({before[i], before[i] + s.state_floats()});
    for (int64_t t = 0; t < counts[i]; ++t) {  // alone, token by token
      Mixed alone = run(kernels, s, own.as<float>() + t * s.projected(), {1}, {state.as<float>()});
      const auto bytes = static_cast<size_t>(s.inner()) * 4;
      check(std::memcmp(alone.y.as(), y + t * s.inner(), bytes) == 0, "same bits in any pass", kernels.name);
      std::memcpy(state.as(), alone.states[0].as(), static_cast<size_t>(s.state_floats()) * 4);
    }
    const auto bytes = static_cast<size_t>(s.state_floats()) * 4;
    check(std::memcmp(state.as(), together.states[i].as(), bytes) == 0, "same state in any pass", kernels.name);
    row += counts[i] * s.projected();
    y += counts[i] * s.inner();
  }
}

}  // namespace

void test_mixers(const Kernels& kernels) {
  const std::vector<int64_t> counts{3, 1, 9};
  for (const bool biased : {false, true}) {
    for (const int64_t channels : {1, 37, 130}) {
      for (const int64_t numbers : {1, 16, 20}) {
        test_case(kernels, {MixerKind::scan, channels, 1, numbers, 1, 1, 0, biased}, counts);
      }
    }
  }
  for (const int64_t dim : {16, 48, 64}) {
    for (const bool mixes_values : {false, true}) test_case(kernels, {MixerKind::wkv, 3, 3, dim, dim, 1, 0, mixes_values}, counts);
  }
  for (const int64_t rows : {1, 37, 300}) {
    for (const int64_t results : {1, 6, 60}) test_case(kernels, {MixerKind::shift, results, 0, 0, rows, 2}, counts);
  }
  for (const int64_t width : {1, 2, 4, 16}) {
    for (const bool biased : {false, true}) {
      for (const int64_t inner : {1, 67, 300}) {
        for (const bool gated : {false, true}) {
          test_case(kernels, {MixerKind::conv, 1, 0, 0, inner, width, 0, biased, gated}, counts);
        }
      }
      for (const int64_t rows : {5, 37, 64}) {
        test_case(kernels, {MixerKind::delta, 4, 2, 16, rows, width, rows, biased}, counts);
        test_case(kernels, {MixerKind::kda, 4, 2, 32, rows, width, rows, biased}, counts);
        test_case(kernels, {MixerKind::ssm, 6, 2, 48, rows, width, 6 * rows, biased}, counts);
        test_case(kernels, {MixerKind::ssm, 3, 1, 16, rows, width, 0, biased}, counts);
      }
    }
  }
}

}  // namespace headrace::tests
