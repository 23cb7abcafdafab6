// Projections and norms, split among threads (linear.h). All plans end in the same epilogue, `finish`.
#include "linear.h"

#include <algorithm>
#include <cstring>

#include "products.h"
#include "scratch.h"

namespace headrace {
namespace {

constexpr int64_t kNearRows = 8;        // prepared activation rows that fit the L1
constexpr int64_t kTaskBytes = 1 << 15; // least weight bytes per task
constexpr int64_t kTasksPerThread = 4;

// Output rows per task: about kTasksPerThread tasks per thread, at least about kTaskBytes of weights each, and of these sizes the most
// even one.
int64_t rows_per_task(const Pool& pool, int64_t rows, int64_t row_bytes) {
  const int64_t threads = pool.threads();
  const int64_t balanced = ceil_div(rows, kTasksPerThread * threads);
  const int64_t worthwhile = ceil_div(kTaskBytes, row_bytes);
  const int64_t most = ceil_div(std::max(balanced, worthwhile), kBand);  // in bands
  const auto longest = [&](int64_t bands) { return ceil_div(ceil_div(rows, bands * kBand), threads) * bands; };
  int64_t best = most;
  for (int64_t bands = most - 1; bands > most / 2; --bands) {
    if (longest(bands) < longest(best)) best = bands;
  }
  return best * kBand;
}

// Columns of the output.
int64_t width_of(const LinearCall& call) { return gates(call.act) ? call.w.n / 2 : call.w.n; }

// Columns per task.
int64_t columns_per_task(const Pool& pool, const LinearCall& call) {
  return rows_per_task(pool, width_of(call), call.w.row_bytes() * (gates(call.act) ? 2 : 1));
}

// out[m][at, at + n) from the products (n) of those columns, which are overwritten; `up` (n): products of a gated unit's second half, or
// nullptr.
void finish(const Kernels& kernels, const LinearCall& call, int64_t m, int64_t at, int64_t n, float* product,
            float* up) {
  const int64_t width = width_of(call);
  float* out = call.out + m * (call.stride > 0 ? call.stride : width) + at;
  if (call.w.bias != nullptr) {
    for (int64_t i = 0; i < n; ++i) product[i] += call.w.bias[at + i];
    if (up != nullptr) {
      for (int64_t i = 0; i < n; ++i) up[i] += call.w.bias[width + at + i];
    }
  }
  if (call.act == Act::squared) square_positive(product, n);
  if (call.act == Act::xielu) kernels.xielu(call.curve, n, product);
  if (up != nullptr) {
    kernels.gated(product, up, n, call.act, out);
  } else if (call.residual != nullptr) {
    const float* residual = call.residual + m * width + at;
    for (int64_t i = 0; i < n; ++i) out[i] = product[i] + residual[i];
  } else {
    std::memcpy(out, product, static_cast<size_t>(n) * sizeof(float));
  }
}

// The call's matrix for each of its rows.
struct Roundings {
  const uint8_t* prompts;
  Matrix fine, other;
  bool all;  // rows have the other rounding

  explicit Roundings(const LinearCall& call) : prompts(call.w.rounds_otherwise() ? call.prompts : nullptr), fine(call.w), other(call.w) {
    other.rounding = call.rounding;
    if (call.rounding == kHalves && !call.w.fits_tiles()) prompts = nullptr;
    all = prompts != nullptr && std::all_of(prompts, prompts + call.rows, [](uint8_t row) { return row != 0; });
  }

  const Matrix& of(int64_t m) const { return prompts != nullptr && prompts[m] != 0 ? other : fine; }
  // Floats of a prepared row.
  int64_t size(const Kernels& kernels) const {
    if (prompts == nullptr) return kernels.prepared_size(fine);
    return all ? kernels.prepared_size(other) : std::max(kernels.prepared_size(fine), kernels.prepared_size(other));
  }
  int64_t most() const { return most_rows(prompts == nullptr ? fine : other); }
  // Rows [m, end) that are rounded alike, at most `most`.
  int64_t alike(int64_t m, int64_t most) const {
    int64_t count = 1;
    while (count < most && &of(m + count) == &of(m)) ++count;
    return count;
  }
};

// A row of x, normalised if the call has a norm, prepared for the matrix.
void prepare_row(const Kernels& kernels, const LinearCall& call, const Matrix& w, int64_t m, float* prepared) {
  const float* x = call.x + m * call.w.k;
  if (call.norm != nullptr) {
    float* normed = scratch(Slot::rows, call.w.k);
    kernels.rms_norm(x, call.norm, call.eps, call.w.k, normed);
    x = normed;
  }
  kernels.prepare(w, x, prepared);
}

// t (M, R): the first products of the call's low-rank ones, times their scales. A task has some rows of x and of A.
const float* low_rank_products(Pool& pool, const Kernels& kernels, const LinearCall& call) {
  const LowRank& low_rank = *call.w.low_rank;
  const Matrix& a = low_rank.a;
  const int64_t stride = kernels.prepared_size(a);
  const int64_t step = ceil_div(kTaskBytes, 4 * a.row_bytes()) * 4;  // rows of A; four are read side by side
  const int64_t together = std::min(kNearRows, ceil_div(call.rows, pool.threads()));
  const int64_t ranges = ceil_div(a.n, step), tasks = ceil_div(call.rows, together) * ranges;
  float* t = scratch(Slot::low_rank, call.rows * a.n);
  pool.run(
      tasks,
      [&](Tasks& tasks) {
        float* prepared = scratch(Slot::panel, together * stride);
        while (tasks.next()) {
          const int64_t m = tasks.index() / ranges * together, row = tasks.index() % ranges * step;
          const int64_t count = std::min(together, call.rows - m), n = std::min(step, a.n - row);
          for (int64_t i = 0; i < count; ++i) prepare_row(kernels, call, a, m + i, prepared + i * stride);
          float* y = t + m * a.n + row;
          kernels.multiply_floats(a, prepared, stride, count, row, n, y, a.n);
          for (int64_t i = 0; i < count; ++i) {
            for (int64_t r = 0; r < n; ++r) y[i * a.n + r] *= low_rank.scales[row + r];
          }
        }
      },
      tasks > 1);
  return t;
}

// Adds the second ones, B t, to the products y (n) of the matrix's rows [row, row + n). t (R): of the activation row.
void add_low_rank(const Kernels& kernels, const LowRank& low_rank, const float* t, int64_t row, int64_t n, float* y) {
  for (int64_t i = 0; i < low_rank.count; ++i) {
    const Factor& b = low_rank.factors[i];
    const int64_t begin = std::max(row, b.row), end = std::min(row + n, b.row + b.rows);
    if (begin < end) kernels.add_factor(b, t + b.first, begin - b.row, end - begin, y + (begin - row));
  }
}

// A task is a range of `step` output columns for all rows; its products (at_once, step) fit the cache. A gated unit has two ranges of
// weight rows, for gate and for up.
void run_columns(Pool& pool, const Kernels& kernels, const LinearCall& call) {
  const Matrix& w = call.w;
  const bool gated = gates(call.act);
  const int64_t width = width_of(call);
  const Roundings roundings(call);
  const int64_t stride = roundings.size(kernels);
  const int64_t batch = call.rows;
  const int64_t at_once = std::min(batch, roundings.most());
  const int64_t step = columns_per_task(pool, call);
  const LowRank* low_rank = w.low_rank;
  const float* t = low_rank == nullptr ? nullptr : low_rank_products(pool, kernels, call);

  // Every thread prepares a single row itself, which is cheaper than waiting.
  float* shared = nullptr;
  if (batch > 1) {
    shared = scratch(Slot::shared_rows, batch * stride);
    pool.run(batch, [&](Tasks& tasks) {
      while (tasks.next()) {
        const int64_t m = tasks.index();
        prepare_row(kernels, call, roundings.of(m), m, shared + m * stride);
      }
    });
  }
  pool.run(ceil_div(width, step), [&](Tasks& tasks) {
    if (!tasks.next()) return;
    const float* prepared = shared;
    if (batch > 1 && batch <= kNearRows) {  // half of them are in other cores' caches
      for (int64_t i = 0; i < batch * stride; i += 16) __builtin_prefetch(shared + i);
    }
    if (batch == 1) {
      float* own = scratch(Slot::panel, stride);
      prepare_row(kernels, call, roundings.of(0), 0, own);
      prepared = own;
    }
    float* products = scratch(Slot::output, 2 * at_once * step);
    float* ups = gated ? products + at_once * step : nullptr;
    const Upcoming after = first_of(pool, call.next, tasks.number());
    do {
      const int64_t at = tasks.index() * step;
      const int64_t n = std::min(step, width - at);
      const Upcoming then = tasks.last_of_own() ? after : Upcoming{&w, at + step};
      for (int64_t m = 0, here = 0; m < batch; m += here) {  // rows that are rounded alike, at most at_once
        here = roundings.alike(m, std::min(at_once, batch - m));
        for (int half = 0; half < (gated ? 2 : 1); ++half) {
          float* y = half == 0 ? products : ups;
          const Upcoming next = gated && half == 0 ? Upcoming{&w, width + at} : then;
          multiply_rows(kernels, roundings.of(m), prepared + m * stride, stride, here, half * width + at, n, y, step, next);
          for (int64_t i = 0; low_rank != nullptr && i < here; ++i) {
            add_low_rank(kernels, *low_rank, t + (m + i) * low_rank->a.n, half * width + at, n, y + i * step);
          }
        }
        for (int64_t i = 0; i < here; ++i) {
          finish(kernels, call, m + i, at, n, products + i * step, gated ? ups + i * step : nullptr);
        }
      }
    } while (tasks.next());
  });
}

// Call act(m) for each row of k numbers; a task has several short rows.
template <class Act>
void each_row(Pool& pool, int64_t rows, int64_t k, const Act& act) {
  const int64_t step = std::max<int64_t>(1, 16384 / std::max<int64_t>(k, 1));  // least rows per task
  pool.run(ceil_div(rows, step), [&](Tasks& tasks) {
    while (tasks.next()) {
      const int64_t end = std::min(rows, (tasks.index() + 1) * step);
      for (int64_t m = tasks.index() * step; m < end; ++m) act(m);
    }
  });
}

}  // namespace

Upcoming first_of(const Pool& pool, const LinearCall* next, int number) {
  if (next == nullptr || !next->w.rounds()) return {};
  const int64_t step = columns_per_task(pool, *next);
  return {&next->w, pool.first_task(ceil_div(width_of(*next), step), number) * step};
}

void run_linear(Pool& pool, const Kernels& kernels, const LinearCall& call) {
  if (call.rows <= 0 || call.w.n <= 0) return;
  pool.label(Work::weights);
  run_columns(pool, kernels, call);
}

void run_norm_add(Pool& pool, const Kernels& kernels, const NormAddCall& call) {
  pool.label(Work::weights);
  pool.run(
      call.rows,
      [&](Tasks& tasks) {
        while (tasks.next()) {
          const int64_t m = tasks.index();
          float* normed = scratch(Slot::rows, call.k);
          kernels.rms_norm(call.x + m * call.k, call.norm, call.eps, call.k, normed);
          const float* residual = call.residual + m * call.k;
          float* out = call.out + m * call.k;
          for (int64_t i = 0; i < call.k; ++i) out[i] = (residual[i] + normed[i]) * call.scale;
        }
      },
      call.rows * call.k > kAloneNumbers);
}

void run_rms_norm(Pool& pool, const Kernels& kernels, const float* x, int64_t rows, int64_t k, const float* norm,
                  float eps, float* out) {
  each_row(pool, rows, k, [&](int64_t m) { kernels.rms_norm(x + m * k, norm, eps, k, out + m * k); });
}

void run_layer_norm(Pool& pool, const Kernels& kernels, const float* x, int64_t rows, int64_t k, const float* norm,
                    const float* bias, float eps, float* out) {
  each_row(pool, rows, k, [&](int64_t m) { kernels.layer_norm(x + m * k, norm, bias, eps, k, out + m * k); });
}

}  // namespace headrace
