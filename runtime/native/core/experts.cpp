// Mixture of experts (experts.h). A pair is a token and one of its experts; pairs are ordered by expert, then by token.
#include "experts.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "products.h"
#include "scratch.h"

namespace headrace {
namespace {

constexpr int64_t kMostPairs = 4096;      // per round: bounds working memory
constexpr int64_t kTaskBytes = 1 << 15;   // least weight bytes per task
constexpr int64_t kTasksPerThread = 4;
constexpr int64_t kAloneTokens = 8;       // most tokens routed by the caller alone

// Experts of the tokens. Arrays are in the calling thread's scratch.
struct Routing {
  int64_t tokens, active, experts;
  int32_t* chosen;    // (tokens, active), ascending
  float* shares;      // (tokens, active)
  float* inputs;      // by pair: the factor of the expert's input, if the rule has shares before
  int32_t* pair_of;   // (tokens, active): index of the pair
  int32_t* token_of;  // (tokens * active), by pair
  int32_t* group;     // experts with tokens, ascending
  int32_t* begin;     // their first pairs, and the end
  int64_t groups = 0, largest = 0;

  Routing(int64_t m, int64_t a, int64_t x) : tokens(m), active(a), experts(x) {
    float* memory = scratch(Slot::routing, 5 * m * a + 2 * x + 1);
    chosen = reinterpret_cast<int32_t*>(memory);
    pair_of = chosen + m * a;
    token_of = pair_of + m * a;
    group = token_of + m * a;
    begin = group + x;
    shares = memory + 3 * m * a + 2 * x + 1;
    inputs = shares + m * a;
  }

  int64_t pairs() const { return tokens * active; }
  int64_t count(int64_t g) const { return begin[g + 1] - begin[g]; }

  // The largest of one token's ranks (ties: the first), in order.
  int32_t* best_of(const float* ranks, int64_t token) {
    int32_t* best = chosen + token * active;
    int64_t held = 0;
    for (int64_t e = 0; e < experts; ++e) {
      if (held == active && !(ranks[e] > ranks[best[held - 1]])) continue;
      int64_t at = held < active ? held++ : held - 1;
      for (; at > 0 && ranks[e] > ranks[best[at - 1]]; --at) best[at] = best[at - 1];
      best[at] = static_cast<int32_t>(e);
    }
    return best;
  }

  // One token's experts and their shares.
  void choose(const float* logits, int64_t token, bool normalized, const RouterRule& rule) {
    rule.plain() ? choose_plainly(logits, token, normalized, rule) : choose_by(logits, token, normalized, rule);
    if (rule.expert_scale == nullptr) return;
    for (int64_t k = token * active; k < (token + 1) * active; ++k) shares[k] *= rule.expert_scale[chosen[k]];
  }

  // By the softmax of logits, without correction and groups. Its sum is over the chosen experts if `normalized`, else over all.
  void choose_plainly(const float* logits, int64_t token, bool normalized, const RouterRule& rule) {
    int32_t* best = best_of(logits, token);
    const float top = logits[best[0]];
    std::sort(best, best + active);
    float total = 0, *share = shares + token * active;
    for (int64_t k = 0; k < active; ++k) {
      share[k] = std::exp(logits[best[k]] - top);
      if (normalized) total += share[k];
    }
    for (int64_t e = 0; e < experts && !normalized; ++e) total += std::exp(logits[e] - top);
    for (int64_t k = 0; k < active; ++k) share[k] = share[k] / total * rule.scale;
  }

  // By a rule that is not plain(): scores of all experts, and ranks, which are scores with the correction.
  void choose_by(const float* logits, int64_t token, bool normalized, const RouterRule& rule) {
    float* scores = scratch(Slot::rows, 2 * experts);
    float* ranks = scores + experts;
    const float top = *std::max_element(logits, logits + experts);
    float all = 0;
    for (int64_t e = 0; e < experts; ++e) {
      scores[e] = rule.sigmoid ? 1.0f / (1.0f + std::exp(-logits[e])) : std::exp(logits[e] - top);
      all += scores[e];
    }
    for (int64_t e = 0; e < experts; ++e) {
      if (!rule.sigmoid) scores[e] /= all;
      ranks[e] = scores[e] + (rule.correction == nullptr ? 0.0f : rule.correction[e]);
    }
    const bool limited = rule.groups.second < rule.groups.first;
    if (limited) leave_groups(ranks, rule.groups, rule.best);
    // Without either the logits are in the same order, and without the ties of rounded scores.
    int32_t* best = best_of(limited || rule.correction != nullptr ? ranks : logits, token);
    std::sort(best, best + active);
    float total = 0, *share = shares + token * active;
    for (int64_t k = 0; k < active; ++k) total += share[k] = scores[best[k]];
    const float factor = normalized && active > 1 ? rule.scale / total : rule.scale;
    for (int64_t k = 0; k < active; ++k) share[k] *= factor;
  }

  // Ranks of experts outside the best groups, by the sum of their `best` largest, become 0.
  void leave_groups(float* ranks, std::pair<int, int> groups, int best) const {
    const int64_t size = experts / groups.first;
    std::vector<std::pair<float, int64_t>> order;
    for (int64_t g = 0; g < groups.first; ++g) {
      float first = -std::numeric_limits<float>::infinity(), second = first;
      for (int64_t e = g * size; e < (g + 1) * size; ++e) {
        if (ranks[e] > first) {
          second = std::exchange(first, ranks[e]);
        } else {
          second = std::max(second, ranks[e]);
        }
      }
      order.emplace_back(best > 1 && size > 1 ? first + second : first, g);
    }
    std::stable_sort(order.begin(), order.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    for (size_t i = static_cast<size_t>(groups.second); i < order.size(); ++i) {
      std::fill_n(ranks + order[i].second * size, size, 0.0f);
    }
  }

  // Order the pairs by expert, then by token (a counting sort): pair_of, token_of, group and begin from `chosen`.
  void order() {
    std::fill(group, group + experts, 0);  // tokens of each expert, at first
    for (int64_t i = 0; i < pairs(); ++i) ++group[chosen[i]];
    int32_t* next = begin;  // of each expert, at first
    int32_t sum = 0;
    for (int64_t e = 0; e < experts; ++e) {
      next[e] = sum;
      sum += group[e];
    }
    for (int64_t i = 0; i < pairs(); ++i) {
      pair_of[i] = next[chosen[i]]++;
      token_of[pair_of[i]] = static_cast<int32_t>(i / active);
    }
    int32_t from = 0;
    groups = largest = 0;
    for (int64_t e = 0; e < experts; ++e) {
      const int32_t end = next[e];  // groups <= e: not overwritten yet
      if (end == from) continue;
      group[groups] = static_cast<int32_t>(e);
      begin[groups++] = from;
      largest = std::max<int64_t>(largest, end - from);
      from = end;
    }
    begin[groups] = from;
  }

  // Moves the shares of ordered pairs to the experts' inputs.
  void share_inputs() {
    for (int64_t i = 0; i < pairs(); ++i) inputs[pair_of[i]] = std::exchange(shares[i], 1.0f);
  }
};

// Activation rows prepared for a matrix's kernels.
struct Prepared {
  const float* rows;
  int64_t stride;
};

// Whether rows that are prepared for one matrix suit the other.
bool alike(const Matrix& a, const Matrix& b) { return a.bits == b.bits && a.group == b.group && a.rounds() == b.rounds(); }

// x (rows, K), normalized if there is a norm, prepared for w in a slot of scratch.
Prepared prepare(Pool& pool, const Kernels& kernels, const Matrix& w, const float* x, int64_t rows, const float* norm,
                 float eps, Slot slot) {
  const int64_t stride = kernels.prepared_size(w);
  float* to = scratch(slot, rows * stride);
  pool.run(rows, [&](Tasks& tasks) {
    while (tasks.next()) {
      const float* from = x + tasks.index() * w.k;
      if (norm != nullptr) {
        float* normed = scratch(Slot::rows, w.k);
        kernels.rms_norm(from, norm, eps, w.k, normed);
        from = normed;
      }
      kernels.prepare(w, from, to + tasks.index() * stride);
    }
  });
  return {to, stride};
}

// Output columns per task, of `groups` experts with `width` each.
int64_t columns_per_task(const Pool& pool, int64_t groups, int64_t width, int64_t column_bytes) {
  const int64_t balanced = ceil_div(groups * width, kTasksPerThread * pool.threads());
  const int64_t step = std::max(balanced, ceil_div(kTaskBytes, column_bytes));
  const int64_t parts = ceil_div(width, step);
  return ceil_div(ceil_div(width, parts), kBand) * kBand;
}

// The prepared rows of a group's tokens, copied once per group if there are several.
class Gathered {
 public:
  Gathered(const Routing& routing, Prepared x, Slot slot) : routing_(routing), x_(x), slot_(slot) {}

  const float* of(int64_t g) {
    const int32_t* tokens = routing_.token_of + routing_.begin[g];
    const int64_t count = routing_.count(g);
    if (count == 1) return x_.rows + tokens[0] * x_.stride;
    if (g != held_) {
      copy_ = scratch(slot_, routing_.largest * x_.stride);
      for (int64_t i = 0; i < count; ++i) {
        std::memcpy(copy_ + i * x_.stride, x_.rows + tokens[i] * x_.stride, static_cast<size_t>(x_.stride) * sizeof(float));
      }
      held_ = g;
    }
    return copy_;
  }

 private:
  const Routing& routing_;
  Prepared x_;
  Slot slot_;
  int64_t held_ = -1;
  float* copy_ = nullptr;
};

// Add the bias of weight rows [row, row + n) to product (n), if w has one.
void add_bias(const Matrix& w, int64_t row, int64_t n, float* product) {
  if (w.bias == nullptr) return;
  for (int64_t i = 0; i < n; ++i) product[i] += w.bias[row + i];
}

// inner (pairs, F) = act(gate) * up, or act(up). A task has columns [at, at + n) of a group's expert, for all of its tokens.
void run_gated(Pool& pool, const Kernels& kernels, const ExpertsCall& call, const Routing& routing, Prepared gate_x,
               Prepared up_x, float* inner) {
  const int64_t width = call.inner();
  const bool gated = gates(call.act);
  const Matrix& first = gated ? call.gate : call.up;
  const int64_t step = columns_per_task(pool, routing.groups, width, (gated ? 2 : 1) * first.row_bytes());
  const int64_t chunks = ceil_div(width, step);
  const int64_t at_once = std::min(routing.largest, std::min(most_rows(first), most_rows(call.up)));
  pool.run(routing.groups * chunks, [&](Tasks& tasks) {
    if (!tasks.next()) return;
    float* products = scratch(Slot::output, 2 * at_once * step);
    float* ups = products + at_once * step;
    Gathered gate_rows(routing, gate_x, Slot::panel), up_rows(routing, up_x, Slot::tile);
    do {
      const int64_t g = tasks.index() / chunks, at = tasks.index() % chunks * step;
      const int64_t n = std::min(step, width - at), row = routing.group[g] * width + at;
      const int64_t following = tasks.index() + 1;
      Upcoming then, up;
      if (call.up.rounds()) up = {&call.up, row};
      if (first.rounds() && following < routing.groups * chunks && !tasks.last_of_own()) {
        then = {&first, following % chunks != 0 ? row + n : routing.group[following / chunks] * width};
      }
      const float* for_gate = gate_rows.of(g);
      const float* for_up = up_x.rows == gate_x.rows ? for_gate : up_rows.of(g);
      for (int64_t m = 0; m < routing.count(g); m += at_once) {
        const int64_t here = std::min(at_once, routing.count(g) - m);
        if (gated) multiply_rows(kernels, first, for_gate + m * gate_x.stride, gate_x.stride, here, row, n, products, step, up);
        multiply_rows(kernels, call.up, for_up + m * up_x.stride, up_x.stride, here, row, n, ups, step, then);
        for (int64_t i = 0; i < here; ++i) {
          const int64_t pair = routing.begin[g] + m + i;
          float *gate = products + i * step, *up_row = ups + i * step, *to = inner + pair * width + at;
          if (call.rule.before) {
            if (gated) kernels.rescale(gate, routing.inputs[pair], n);
            kernels.rescale(up_row, routing.inputs[pair], n);
          }
          add_bias(call.up, row, n, up_row);
          if (gated) {
            add_bias(first, row, n, gate);
            kernels.gated(gate, up_row, n, call.act, to);
          } else {
            square_positive(up_row, n);
            std::memcpy(to, up_row, static_cast<size_t>(n) * sizeof(float));
          }
        }
      }
    } while (tasks.next());
  });
}

// Not inlined, so that both callers round alike.
[[gnu::noinline]] void add_share(const float* product, float share, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] += share * product[i];
}

// What experts are added to: n columns of a row.
void start(const ExpertsCall& call, const float* x, int64_t n, float* out) {
  if (!call.residual) {
    std::fill(out, out + n, 0.0f);
  } else if (out != x) {
    std::memcpy(out, x, static_cast<size_t>(n) * sizeof(float));
  }
}

// One token: each task reads its columns of every chosen expert.
void run_down_alone(Pool& pool, const Kernels& kernels, const ExpertsCall& call, const Routing& routing, Prepared inner,
                    const float* x, float* out) {
  const Matrix& w = call.down;
  const int64_t width = w.n / routing.experts;
  const int64_t step = columns_per_task(pool, 1, width, routing.groups * w.row_bytes());
  pool.run(ceil_div(width, step), [&](Tasks& tasks) {
    if (!tasks.next()) return;
    float* product = scratch(Slot::output, step);
    const Upcoming after = first_of(pool, call.next, tasks.number());
    do {
      const int64_t at = tasks.index() * step, n = std::min(step, width - at);
      start(call, x + at, n, out + at);
      for (int64_t g = 0; g < routing.groups; ++g) {
        const int64_t row = routing.group[g] * width + at;
        const bool last = g + 1 == routing.groups;
        Upcoming then{&w, last ? routing.group[0] * width + at + n : routing.group[g + 1] * width + at};
        if (last && tasks.last_of_own()) then = after;
        multiply_rows(kernels, w, inner.rows + g * inner.stride, inner.stride, 1, row, n, product, step, then);
        add_bias(w, row, n, product);
        add_share(product, routing.shares[g], n, out + at);
      }
    } while (tasks.next());
  });
}

// Several tokens: every expert's products with its tokens, (pairs, E), then each token's sum.
void run_down(Pool& pool, const Kernels& kernels, const ExpertsCall& call, const Routing& routing, Prepared inner,
              const float* x, float* out) {
  const Matrix& w = call.down;
  const int64_t width = w.n / routing.experts;
  const int64_t step = columns_per_task(pool, routing.groups, width, w.row_bytes());
  const int64_t chunks = ceil_div(width, step), at_once = most_rows(w);
  float* products = scratch(Slot::products, routing.pairs() * width);
  pool.run(routing.groups * chunks, [&](Tasks& tasks) {
    while (tasks.next()) {
      const int64_t g = tasks.index() / chunks, at = tasks.index() % chunks * step;
      const int64_t n = std::min(step, width - at), row = routing.group[g] * width + at;
      for (int64_t m = routing.begin[g]; m < routing.begin[g + 1]; m += at_once) {
        const int64_t here = std::min<int64_t>(at_once, routing.begin[g + 1] - m);
        float* to = products + m * width + at;
        multiply_rows(kernels, w, inner.rows + m * inner.stride, inner.stride, here, row, n, to, width, {});
        for (int64_t i = 0; i < here; ++i) add_bias(w, row, n, to + i * width);
      }
    }
  });
  pool.run(routing.tokens, [&](Tasks& tasks) {
    while (tasks.next()) {
      const int64_t m = tasks.index();
      start(call, x + m * width, width, out + m * width);
      for (int64_t i = m * routing.active; i < (m + 1) * routing.active; ++i) {
        add_share(products + routing.pair_of[i] * width, routing.shares[i], width, out + m * width);
      }
    }
  });
}

// The router's logits (M, X).
void run_router(Pool& pool, const Kernels& kernels, const ExpertsCall& call, const float* x, int64_t rows, float* logits) {
  LinearCall router;
  router.x = x;
  router.rows = rows;
  router.norm = call.router_norm != nullptr ? call.router_norm : call.norm;
  router.eps = call.eps;
  router.w = call.router;
  router.out = logits;
  run_linear(pool, kernels, router);
}

// At most kMostPairs pairs of a call: choose, order, gate and up, then down.
void run_some(Pool& pool, const Kernels& kernels, const ExpertsCall& call, const float* x, int64_t rows, float* out) {
  float* logits = scratch(Slot::logits, rows * call.experts());
  run_router(pool, kernels, call, x, rows, logits);
  Routing routing(rows, call.active, call.experts());
  pool.run(
      rows,
      [&](Tasks& tasks) {
        while (tasks.next()) {
          routing.choose(logits + tasks.index() * call.experts(), tasks.index(), call.normalized, call.rule);
        }
      },
      rows >= kAloneTokens);
  routing.order();
  if (call.rule.before) routing.share_inputs();

  const Matrix& gate = gates(call.act) ? call.gate : call.up;
  const Prepared gate_x = prepare(pool, kernels, gate, x, rows, call.norm, call.eps, Slot::shared_rows);
  Prepared up_x = gate_x;
  if (!alike(gate, call.up)) up_x = prepare(pool, kernels, call.up, x, rows, call.norm, call.eps, Slot::other_rows);
  float* inner = scratch(Slot::inner, routing.pairs() * call.inner());
  run_gated(pool, kernels, call, routing, gate_x, up_x, inner);
  const Prepared turned = prepare(pool, kernels, call.down, inner, routing.pairs(), nullptr, 0, Slot::shared_rows);
  if (rows == 1) {
    run_down_alone(pool, kernels, call, routing, turned, x, out);
  } else {
    run_down(pool, kernels, call, routing, turned, x, out);
  }
}

// At most kMostPairs pairs of a call, from `first` on. An expert outside the stack is computed as expert 0, and its result replaced by NaN.
void run_some_products(Pool& pool, const Kernels& kernels, const ExpertProducts& call, int64_t first, int64_t pairs) {
  const Matrix& w = call.w;
  const int64_t width = call.width(), rows = pairs / call.active;
  Routing routing(rows, call.active, call.experts);
  auto* origin = reinterpret_cast<int32_t*>(scratch(Slot::inner, pairs));  // of each pair in order
  const int32_t* chosen = call.chosen + first;
  const auto known = [&](int64_t i) { return chosen[i] >= 0 && chosen[i] < call.experts; };
  for (int64_t i = 0; i < pairs; ++i) routing.chosen[i] = known(i) ? chosen[i] : 0;
  routing.order();
  for (int64_t i = 0; i < pairs; ++i) origin[routing.pair_of[i]] = static_cast<int32_t>(i);

  const float* x = call.x + first / call.active * w.k;
  float* out = call.out + first * width;
  const Prepared prepared = prepare(pool, kernels, w, x, rows, nullptr, 0, Slot::shared_rows);
  const int64_t step = columns_per_task(pool, routing.groups, width, w.row_bytes());
  const int64_t chunks = ceil_div(width, step), at_once = std::min(routing.largest, most_rows(w));
  pool.run(routing.groups * chunks, [&](Tasks& tasks) {
    if (!tasks.next()) return;
    float* products = scratch(Slot::output, at_once * step);
    Gathered gathered(routing, prepared, Slot::panel);
    do {
      const int64_t g = tasks.index() / chunks, at = tasks.index() % chunks * step, following = tasks.index() + 1;
      const int64_t n = std::min(step, width - at), row = routing.group[g] * width + at;
      Upcoming then;
      if (w.rounds() && following < routing.groups * chunks && !tasks.last_of_own()) {
        then = {&w, following % chunks != 0 ? row + n : routing.group[following / chunks] * width};
      }
      const float* its = gathered.of(g);
      for (int64_t m = 0; m < routing.count(g); m += at_once) {
        const int64_t here = std::min(at_once, routing.count(g) - m);
        multiply_rows(kernels, w, its + m * prepared.stride, prepared.stride, here, row, n, products, step, then);
        for (int64_t i = 0; i < here; ++i) {
          float* product = products + i * step;
          const int64_t pair = origin[routing.begin[g] + m + i];
          add_bias(w, row, n, product);
          if (!known(pair)) std::fill(product, product + n, std::numeric_limits<float>::quiet_NaN());
          std::memcpy(out + pair * width + at, product, static_cast<size_t>(n) * sizeof(float));
        }
      }
    } while (tasks.next());
  });
}

}  // namespace

void run_expert_products(Pool& pool, const Kernels& kernels, const ExpertProducts& call) {
  pool.label(Work::weights);
  const int64_t most = std::max<int64_t>(1, kMostPairs / call.active) * call.active;
  for (int64_t first = 0; first < call.pairs; first += most) {
    run_some_products(pool, kernels, call, first, std::min(most, call.pairs - first));
  }
}

void run_experts(Pool& pool, const Kernels& kernels, const ExpertsCall& call) {
  pool.label(Work::weights);
  const int64_t most = std::max<int64_t>(1, kMostPairs / call.active), width = call.router.k;
  for (int64_t m = 0; m < call.rows; m += most) {
    run_some(pool, kernels, call, call.x + m * width, std::min(most, call.rows - m), call.out + m * width);
  }
}

}  // namespace headrace
