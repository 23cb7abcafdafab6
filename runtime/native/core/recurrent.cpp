// See recurrent.h.
#include "recurrent.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "products.h"

namespace headrace {
namespace {

constexpr int64_t kStateRows = 32;        // of a task: they stay in the L1
constexpr int64_t kTaskFloats = 1 << 14;  // least numbers per task

}  // namespace

void run_recurrence(Pool& pool, const Kernels& kernels, const RecurrenceCall& call) {
  const int64_t parts = ceil_div(call.rows, kStateRows), shared = call.heads / call.key_heads;
  pool.label(Work::attention);
  pool.run(call.batch * call.heads * parts, [&](Tasks& tasks) {
    while (tasks.next()) {
      const int64_t head = tasks.index() / parts % call.heads, b = tasks.index() / parts / call.heads;
      const int64_t from = tasks.index() % parts * kStateRows, rows = std::min(kStateRows, call.rows - from);
      const int64_t at = ((b * call.heads + head) * call.rows + from) * call.dim;
      float* state = call.out_state + at;
      std::memcpy(state, call.state + at, static_cast<size_t>(rows * call.dim) * sizeof(float));
      for (int64_t t = 0; t < call.tokens; ++t) {
        const int64_t token = b * call.tokens + t, own = token * call.heads + head;
        const int64_t key = (token * call.key_heads + head / shared) * call.dim;
        StateToken one;
        one.q = call.q + key;
        one.k = call.k + key;
        one.v = call.v + own * call.rows + from;
        one.decay = call.decay + own * (call.per_key ? call.dim : 1);
        one.beta = call.beta == nullptr ? nullptr : call.beta + own;
        one.y = call.out + own * call.rows + from;
        kernels.recur(one, call.dim, rows, call.per_key, state);
      }
    }
  });
}

void run_convolution(Pool& pool, const Kernels& kernels, const ConvolutionCall& call) {
  const int64_t rows = call.batch * call.tokens;
  const int64_t step = std::max<int64_t>(1, kTaskFloats / std::max<int64_t>(1, call.channels));
  pool.label(Work::attention);
  pool.run(ceil_div(rows, step), [&](Tasks& tasks) {
    std::vector<const float*> seen(static_cast<size_t>(call.width));
    while (tasks.next()) {
      const int64_t end = std::min(rows, (tasks.index() + 1) * step);
      for (int64_t i = tasks.index() * step; i < end; ++i) {
        const int64_t before = i / call.tokens * (call.width - 1);  // further rows of x in sequences before
        for (int64_t j = 0; j < call.width; ++j) seen[static_cast<size_t>(j)] = call.x + (i + before + j) * call.channels;
        kernels.convolve(seen.data(), call.weight, call.channels, call.bias, call.channels, call.width, Act::none,
                         call.out + i * call.channels);
      }
    }
  });
}

void run_gated(Pool& pool, const Kernels& kernels, const float* gate, const float* up, int64_t n, Act act, float* out) {
  pool.label(Work::weights);
  pool.run(ceil_div(n, kTaskFloats), [&](Tasks& tasks) {
    while (tasks.next()) {
      const int64_t at = tasks.index() * kTaskFloats;
      kernels.gated(gate + at, up == nullptr ? nullptr : up + at, std::min(kTaskFloats, n - at), act, out + at);
    }
  });
}

}  // namespace headrace
