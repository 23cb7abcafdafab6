// Recurrent token mixing, split among threads (mixer.h). conv, scan, wkv and shift have a function each; delta, kda and ssm share one
// convolution of all heads and then run_head.
#include "mixer.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "products.h"
#include "scratch.h"

namespace headrace {
namespace {

constexpr int64_t kStateRows = 32;  // of a head's state at a time: they stay in the L1
constexpr int64_t kChannels = 256;  // of a short convolution's task
constexpr int64_t kScanned = 64;    // channels of a scan's task: their states and rates stay in the L1
constexpr int64_t kMostWidth = 16;  // taps
constexpr int64_t kAloneNumbers = 1 << 14;  // numbers of a shift's results that the caller computes alone

// Convolves channels [from, from + n) of a sequence's rows, `input` (row i of the sequence: input + i * stride) behind its state, and
// writes row i to out + i * out_stride. The new state's part of these channels follows.
void convolve(const Kernels& kernels, const MixerShape& shape, const MixerRows& rows, const float* input, int64_t stride,
              int64_t from, int64_t n, Act act, float* out, int64_t out_stride) {
  const int64_t channels = shape.channels(), before = shape.width - 1;
  const float* seen[kMostWidth];
  const auto row_at = [&](int64_t i) {  // of the input, counted from the oldest row of the state
    return i < before ? rows.state + i * channels + from : input + (i - before) * stride;
  };
  for (int64_t t = 0; t < rows.count; ++t) {
    for (int64_t j = 0; j < shape.width; ++j) seen[j] = row_at(t + j);
    const float* bias = shape.tap_bias == nullptr ? nullptr : shape.tap_bias + from;
    kernels.convolve(seen, shape.taps + from, channels, bias, n, shape.width, act, out + t * out_stride);
  }
  for (int64_t i = 0; i < before; ++i) {
    std::memcpy(rows.out_state + i * channels + from, row_at(rows.count + i), static_cast<size_t>(n) * sizeof(float));
  }
}

// conv: out = C * convolved(B * x), or the activated convolution of x alone. A task has kChannels channels of a sequence.
void run_short_convolution(Pool& pool, const Kernels& kernels, const MixerCall& call) {
  const MixerShape& shape = call.shape;
  const int64_t width = shape.rows, stride = shape.projected(), parts = ceil_div(width, kChannels);
  float* inputs = scratch(Slot::mixed, call.tokens * width);
  pool.run(call.count * parts, [&](Tasks& tasks) {
    while (tasks.next()) {
      const MixerRows& rows = call.sequences[tasks.index() / parts];
      const int64_t from = tasks.index() % parts * kChannels, n = std::min(kChannels, width - from);
      const float* x = call.x + rows.row * stride + from;
      float* input = inputs + rows.row * width + from;
      float* out = call.out + rows.row * width + from;
      if (!shape.gated) {
        convolve(kernels, shape, rows, x, stride, from, n, shape.act, out, width);
        continue;
      }
      for (int64_t t = 0; t < rows.count; ++t) {
        kernels.multiply_pairs(x + t * stride, x + t * stride + 2 * width, n, input + t * width);
      }
      convolve(kernels, shape, rows, input, width, from, n, Act::none, out, width);
      for (int64_t t = 0; t < rows.count; ++t) {
        kernels.multiply_pairs(x + t * stride + width, out + t * width, n, out + t * width);
      }
    }
  });
}

// scan: a task has kScanned channels of a sequence, each with Dk numbers of state.
void run_scan(Pool& pool, const Kernels& kernels, const MixerCall& call) {
  const MixerShape& shape = call.shape;
  const int64_t channels = shape.heads, numbers = shape.dim, parts = ceil_div(channels, kScanned);
  pool.run(call.count * parts, [&](Tasks& tasks) {
    while (tasks.next()) {
      const MixerRows& rows = call.sequences[tasks.index() / parts];
      const int64_t from = tasks.index() % parts * kScanned, n = std::min(kScanned, channels - from);
      const float* skip = shape.skip == nullptr ? nullptr : shape.skip + from;
      float* state = rows.out_state + from * numbers;
      std::memcpy(state, rows.state + from * numbers, static_cast<size_t>(n * numbers) * sizeof(float));
      for (int64_t t = rows.row; t < rows.row + rows.count; ++t) {
        const float* x = call.x + t * shape.projected();
        ScanToken token;
        token.x = x + from;
        token.z = token.x + channels;
        token.step = token.z + channels;
        token.b = x + 3 * channels;
        token.c = token.b + numbers;
        token.y = call.out + t * channels + from;
        kernels.scan(token, shape.rate + from * numbers, skip, n, numbers, state);
      }
    }
  });
}

// wkv: a task has a head of a sequence.
void run_wkv(Pool& pool, const Kernels& kernels, const MixerCall& call) {
  const MixerShape& shape = call.shape;
  const int64_t dim = shape.dim, width = shape.inner();
  pool.run(call.count * shape.heads, [&](Tasks& tasks) {
    while (tasks.next()) {
      const MixerRows& rows = call.sequences[tasks.index() / shape.heads];
      const int64_t from = tasks.index() % shape.heads * dim;  // the head's first number
      const WkvHead& every = shape.wkv;
      const WkvHead head{every.removed_key + from, every.key_rate + from, every.bonus + from, every.norm + from, every.norm_bias + from};
      float* state = rows.out_state + from * dim;
      std::memcpy(state, rows.state + from * dim, static_cast<size_t>(dim * dim) * sizeof(float));
      float* change = scratch(Slot::scores, 5 * dim);  // 4 Dk for the kernel, and Dk for mixed values
      float* value = change + 4 * dim;
      for (int64_t t = rows.row; t < rows.row + rows.count; ++t) {
        const float* x = call.x + t * shape.projected() + from;
        WkvToken token{x,
                       x + width,
                       x + 2 * width,
                       x + 3 * width,
                       x + 4 * width,
                       x + 5 * width,
                       call.out + t * width + from};
        if (shape.mixes_values) {
          kernels.gated(x + 7 * width, nullptr, dim, Act::sigmoid, value);  // the share of the first layer's values
          kernels.interpolate(token.v, x + 6 * width, value, dim, value);
          token.v = value;
        }
        kernels.wkv(token, head, shape.eps, dim, state, change);
      }
    }
  });
}

// shift: result h of a row is x + (before - x) * taps[h], for channels in parts of kChannels.
void run_shift(Pool& pool, const Kernels& kernels, const MixerCall& call) {
  const MixerShape& shape = call.shape;
  const int64_t width = shape.rows, parts = ceil_div(width, kChannels);
  pool.run(call.count * parts, [&](Tasks& tasks) {
    while (tasks.next()) {
      const MixerRows& rows = call.sequences[tasks.index() / parts];
      const int64_t from = tasks.index() % parts * kChannels, n = std::min(kChannels, width - from);
      const float* before = rows.state + from;
      for (int64_t t = rows.row; t < rows.row + rows.count; ++t) {
        const float* x = call.x + t * width + from;
        float* out = call.out + t * shape.inner() + from;
        for (int64_t at = 0; at < shape.inner(); at += width) kernels.interpolate(x, before, shape.taps + at + from, n, out + at);
        before = x;
      }
      std::memcpy(rows.out_state + from, before, static_cast<size_t>(n) * sizeof(float));
    }
  }, call.tokens * shape.inner() > kAloneNumbers);
}

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// y of one head of delta, kda or ssm, for all rows of a sequence, gated and normalized unless the norm spans heads.
// mixed: (N, C) convolved and activated rows of all sequences, q and k normalized if by_rule().
void run_head(const Kernels& kernels, const MixerCall& call, const MixerRows& rows, int64_t head, const float* mixed) {
  const MixerShape& shape = call.shape;
  const int64_t dim = shape.dim, channels = shape.channels(), stride = shape.projected();
  const int64_t key = head / (shape.heads / shape.key_heads) * dim;
  const bool delta = shape.by_rule();
  const int64_t decays = shape.head_decays(), gate = decays + 1;
  // (count, gate): each row's decays, then beta (by_rule) or the step (ssm); behind them the values of one row, ssm only.
  float* gates = scratch(Slot::scores, gate * rows.count + shape.rows);
  float* value = gates + gate * rows.count;

  // Decays and beta of every row, once for all parts of the state.
  for (int64_t t = 0; t < rows.count; ++t) {
    const float* x = call.x + (rows.row + t) * stride;
    float *own = gates + t * gate, taken = 0;
    if (shape.kind == MixerKind::kda) {
      kernels.decays(x + shape.steps_at() + head * dim, shape.step_bias + head * dim, shape.rate[head], dim, own);
    } else {
      const float step = softplus(x[shape.steps_at() + head] + shape.step_bias[head]);
      taken = delta ? step : std::clamp(step, shape.least_step, shape.most_step);
      *own = std::exp(shape.rate[head] * taken);
    }
    own[decays] = delta ? shape.most_beta * sigmoid(x[shape.betas_at() + head]) : taken;
  }

  // The recurrence. Rows of the state do not depend on each other: kStateRows of them go through all tokens before the next ones.
  float* out = call.out + rows.row * shape.inner() + head * shape.rows;
  const int64_t state_at = shape.taps_floats() + head * shape.rows * dim;  // of the head's (Dv, Dk)
  for (int64_t from = 0; from < shape.rows; from += kStateRows) {
    const int64_t n = std::min(kStateRows, shape.rows - from);
    float* state = rows.out_state + state_at + from * dim;
    std::memcpy(state, rows.state + state_at + from * dim, static_cast<size_t>(n * dim) * sizeof(float));
    for (int64_t t = 0; t < rows.count; ++t) {
      const float* row = mixed + (rows.row + t) * channels;
      const float* v = row + 2 * shape.key_heads * dim + head * shape.rows + from;
      StateToken token;
      token.q = row + key;
      token.k = row + shape.key_heads * dim + key;
      token.v = v;
      token.decay = gates + t * gate;
      token.beta = delta ? token.decay + decays : nullptr;
      token.y = out + t * shape.inner() + from;
      if (!delta) {  // without beta the kernel adds v k as they are: the step multiplies v here
        for (int64_t i = 0; i < n; ++i) value[i] = v[i] * token.decay[decays];
        token.v = value;
      }
      kernels.recur(token, dim, n, shape.kind == MixerKind::kda, state);
      if (shape.skip != nullptr) {
        for (int64_t i = 0; i < n; ++i) token.y[i] += v[i] * shape.skip[head];
      }
    }
  }

  // Gate and norm of the head, in place.
  const bool own_norm = shape.norm != nullptr && shape.norm_each;
  for (int64_t t = 0; t < rows.count; ++t) {
    float* y = out + t * shape.inner();
    const float* z = call.x + (rows.row + t) * stride + shape.gates_at() + head * shape.rows;
    if (own_norm && shape.norm_first) kernels.rms_norm(y, shape.norm, shape.eps, shape.rows, y);
    kernels.gated(z, y, shape.rows, shape.kind == MixerKind::kda ? Act::sigmoid : Act::silu, y);
    if (own_norm && !shape.norm_first) kernels.rms_norm(y, shape.norm, shape.eps, shape.rows, y);
  }
}

}  // namespace

void run_mixer(Pool& pool, const Kernels& kernels, const MixerCall& call) {
  if (call.tokens <= 0) return;
  pool.label(Work::attention);
  const MixerShape& shape = call.shape;
  if (shape.kind == MixerKind::conv) return run_short_convolution(pool, kernels, call);
  if (shape.kind == MixerKind::scan) return run_scan(pool, kernels, call);
  if (shape.kind == MixerKind::wkv) return run_wkv(pool, kernels, call);
  if (shape.kind == MixerKind::shift) return run_shift(pool, kernels, call);

  // delta, kda and ssm. The convolution, split into the heads of q, of k and of v; q and k are normalized by their task.
  const int64_t keys = 2 * shape.key_heads, units = keys + shape.heads, channels = shape.channels();
  float* mixed = scratch(Slot::mixed, call.tokens * channels);
  pool.run(call.count * units, [&](Tasks& tasks) {
    while (tasks.next()) {
      const MixerRows& rows = call.sequences[tasks.index() / units];
      const int64_t unit = tasks.index() % units;
      const int64_t from = unit < keys ? unit * shape.dim : keys * shape.dim + (unit - keys) * shape.rows;
      const int64_t n = unit < keys ? shape.dim : shape.rows;
      float* out = mixed + rows.row * channels + from;
      const float* input = call.x + rows.row * shape.projected() + from;
      convolve(kernels, shape, rows, input, shape.projected(), from, n, Act::silu, out, channels);
      if (!shape.by_rule() || unit >= keys) continue;
      // x / sqrt(|x|^2 + 1e-6) by the RMSNorm kernel, which divides by sqrt(|x|^2 / Dk + eps): a scale of 1 / sqrt(Dk) makes them equal.
      // q_scale has a further 1 / sqrt(Dk), the factor of scores.
      const float* scale = unit < shape.key_heads ? shape.q_scale : shape.k_scale;
      const float eps = 1e-6f / static_cast<float>(shape.dim);
      for (int64_t t = 0; t < rows.count; ++t) kernels.rms_norm(out + t * channels, scale, eps, n, out + t * channels);
    }
  });

  // The recurrence, a task for each head of a sequence.
  pool.run(call.count * shape.heads, [&](Tasks& tasks) {
    while (tasks.next()) {
      run_head(kernels, call, call.sequences[tasks.index() / shape.heads], tasks.index() % shape.heads, mixed);
    }
  });

  // A norm over several heads or all, after the gate.
  if (shape.norm == nullptr || shape.norm_each) return;
  const int64_t groups = shape.inner() / shape.norm_size;
  pool.run(call.tokens, [&](Tasks& tasks) {
    while (tasks.next()) {
      for (int64_t group = 0; group < groups; ++group) {
        float* y = call.out + tasks.index() * shape.inner() + group * shape.norm_size;
        kernels.rms_norm(y, shape.norm + group * shape.norm_size, shape.eps, shape.norm_size, y);
      }
    }
  }, call.tokens > 1);
}

}  // namespace headrace
