// Recurrences with a matrix as a head's state, scans of each channel by itself, and causal convolutions likewise.
//
// One token at a time, for core/mixer.cpp; shapes are at the contracts of core/kernels.h (recur, scan, wkv, convolve, decays). With the
// state S (rows, D) of a head, and decay one number or D:
//
//   S = S * decay;  value = v, or beta (v - S k) with beta;  S = S + value k^T;  y = S q
//
// Guard: runtime/native/tests/mixer.cpp; tests/runtime/ops/test_native_recurrent.py.
#pragma once

#include "elementwise.h"

namespace headrace::HEADRACE_ISA {

// R rows of the state, from `row` on, with one token. state: the head's (rows, dim); with: q . k. The state is read once for S k and S q:
// y = S q of the new state is that of the old one plus value * with. A decay that is one number multiplies sums, not the state, until then.
template <int R, bool kDelta, bool kPerKey>
inline void recur_rows(const StateToken& t, float with, int64_t dim, int64_t row, float* state) {
  float* own = state + row * dim;
  vf of_k[R], of_q[R];
  for (int r = 0; r < R; ++r) of_k[r] = of_q[r] = zero();
  for (int64_t d = 0; d < dim; d += W) {
    const vf key = load(t.k + d), query = load(t.q + d);
    for (int r = 0; r < R; ++r) {
      vf s = load(own + r * dim + d);
      if (kPerKey) {
        s = mul(s, load(t.decay + d));
        store(own + r * dim + d, s);
      }
      if (kDelta) of_k[r] = fma(s, key, of_k[r]);
      of_q[r] = fma(s, query, of_q[r]);
    }
  }
  const float decay = kPerKey ? 1.0f : *t.decay;
  vf added[R];
  for (int r = 0; r < R; ++r) {
    float value = t.v[row + r];
    if (kDelta) value = *t.beta * (value - decay * sum(of_k[r]));
    t.y[row + r] = decay * sum(of_q[r]) + value * with;
    added[r] = set1(value);
  }
  for (int64_t d = 0; d < dim; d += W) {
    const vf key = load(t.k + d);
    for (int r = 0; r < R; ++r) {
      const vf s = load(own + r * dim + d);
      store(own + r * dim + d, fma(key, added[r], kPerKey ? s : mul(s, set1(decay))));
    }
  }
}

template <bool kDelta, bool kPerKey>
inline void recur_as(const StateToken& t, int64_t dim, int64_t rows, float* state) {
  vf products = zero();
  for (int64_t d = 0; d < dim; d += W) products = fma(load(t.q + d), load(t.k + d), products);
  const float with = sum(products);
  int64_t row = 0;
  for (; row + 4 <= rows; row += 4) recur_rows<4, kDelta, kPerKey>(t, with, dim, row, state);
  for (; row < rows; ++row) recur_rows<1, kDelta, kPerKey>(t, with, dim, row, state);
}

inline void recur(const StateToken& t, int64_t dim, int64_t rows, bool per_key, float* state) {
  if (t.beta != nullptr) {
    per_key ? recur_as<true, true>(t, dim, rows, state) : recur_as<true, false>(t, dim, rows, state);
  } else {
    per_key ? recur_as<false, true>(t, dim, rows, state) : recur_as<false, false>(t, dim, rows, state);
  }
}

// Weights (width, n), rows `ldw` floats apart; x[j] (n) is the input of width - 1 - j tokens ago.
inline void convolve(const float* const* x, const float* weight, int64_t ldw, const float* bias, int64_t n, int64_t width, Act act,
                     float* out) {
  for (int64_t c = 0; c < n; c += W) {
    const int64_t here = n - c < W ? n - c : W;
    vf acc = bias == nullptr ? zero() : load_first(bias + c, here);
    for (int64_t j = 0; j < width; ++j) acc = fma(load_first(x[j] + c, here), load_first(weight + j * ldw + c, here), acc);
    store_first(out + c, act == Act::silu ? silu(acc) : acc, here);
  }
}

// log(1 + x) for x in [0, 1]: 2 artanh(s) with s = x / (2 + x) <= 1/3, whose series ends below float's precision.
inline vf log_of_more(vf x) {
  const vf s = div(x, add(set1(2.0f), x)), square = mul(s, s);
  vf sum = set1(2.0f / 13);
  for (int odd = 11; odd > 0; odd -= 2) sum = fma(sum, square, set1(2.0f / static_cast<float>(odd)));
  return mul(s, sum);
}

// log(1 + e^x), by the exponential of -|x|.
inline vf softplus(vf x) {
  const vf positive = max(x, zero());
  return add(positive, log_of_more(exp(sub(x, add(positive, positive)))));
}

inline void decays(const float* x, const float* bias, float rate, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += W) {
    const int64_t here = n - i < W ? n - i : W;
    const vf step = softplus(add(load_first(x + i, here), load_first(bias + i, here)));
    store_first(out + i, exp(mul(set1(rate), step)), here);
  }
}

// Steps and results are vectors of W channels, states vectors of a channel's numbers.
inline void scan(const ScanToken& t, const float* rate, const float* skip, int64_t channels, int64_t numbers, float* state) {
  alignas(64) float steps[W], added[W];
  for (int64_t from = 0; from < channels; from += W) {
    const int64_t here = channels - from < W ? channels - from : W;
    const vf x = load_first(t.x + from, here), step = softplus(load_first(t.step + from, here));
    store(steps, step);
    store(added, mul(step, x));
    vf products[W];
    for (int i = 0; i < W; ++i) products[i] = zero();
    for (int64_t i = 0; i < here; ++i) {
      const float* rates = rate + (from + i) * numbers;
      float* own = state + (from + i) * numbers;
      for (int64_t n = 0; n < numbers; n += W) {
        const int64_t width = numbers - n < W ? numbers - n : W;
        const vf decay = exp(mul(load_first(rates + n, width), set1(steps[i])));
        const vf more = mul(load_first(t.b + n, width), set1(added[i]));
        const vf s = fma(load_first(own + n, width), decay, more);
        store_first(own + n, s, width);
        products[i] = fma(s, load_first(t.c + n, width), products[i]);
      }
    }
    vf y = sums(products);
    if (skip != nullptr) y = fma(x, load_first(skip + from, here), y);
    store_first(t.y + from, mul(silu(load_first(t.z + from, here)), y), here);
  }
}

constexpr float kSlowestDecay = -0.606531f;  // -exp(-1/2): the logarithm of a decay is this times a sigmoid
constexpr float kShortestKey = 1e-7f;        // length that a removed key is divided by, at least

// The change of a state by a token of RWKV-7: decay, added key, removed key a and its replacement b (D each).
struct WkvChange {
  float *decay, *key, *a, *b;
};

// Writes the change. Returns r . bonus k, the share of v that joins the result.
inline float change_of(const WkvToken& t, const WkvHead& head, int64_t dim, const WkvChange& change) {
  vf squares = zero(), shares = zero();
  for (int64_t d = 0; d < dim; d += W) {
    const vf key = load(t.k + d), rate = sigmoid(load(t.a + d)), removed = mul(key, load(head.removed_key + d));
    const vf added = mul(key, fma(sub(rate, set1(1.0f)), load(head.key_rate + d), set1(1.0f)));
    squares = fma(removed, removed, squares);
    shares = fma(mul(load(t.r + d), added), load(head.bonus + d), shares);
    store(change.decay + d, exp(mul(set1(kSlowestDecay), sigmoid(load(t.w + d)))));
    store(change.key + d, added);
    store(change.a + d, removed);
    store(change.b + d, rate);
  }
  const float length = __builtin_sqrtf(sum(squares));
  const vf factor = set1(1.0f / (length > kShortestKey ? length : kShortestKey));
  for (int64_t d = 0; d < dim; d += W) {
    const vf unit = mul(load(change.a + d), factor);
    store(change.a + d, sub(zero(), unit));
    store(change.b + d, mul(unit, load(change.b + d)));
  }
  return sum(shares);
}

// R rows of the state with one token: S = S * decay + (S a) b^T + v k^T, y = S r.
template <int R>
inline void change_rows(const WkvToken& t, const WkvChange& change, int64_t dim, int64_t row, float* state) {
  float* own = state + row * dim;
  vf removed[R], value[R], products[R];
  for (int r = 0; r < R; ++r) removed[r] = products[r] = zero();
  for (int64_t d = 0; d < dim; d += W) {
    const vf a = load(change.a + d);
    for (int r = 0; r < R; ++r) removed[r] = fma(load(own + r * dim + d), a, removed[r]);
  }
  for (int r = 0; r < R; ++r) {
    removed[r] = set1(sum(removed[r]));
    value[r] = set1(t.v[row + r]);
  }
  for (int64_t d = 0; d < dim; d += W) {
    const vf decay = load(change.decay + d), b = load(change.b + d), key = load(change.key + d), query = load(t.r + d);
    for (int r = 0; r < R; ++r) {
      const vf kept = fma(removed[r], b, mul(load(own + r * dim + d), decay));
      const vf s = fma(value[r], key, kept);
      store(own + r * dim + d, s);
      products[r] = fma(s, query, products[r]);
    }
  }
  for (int r = 0; r < R; ++r) t.y[row + r] = sum(products[r]);
}

// y = (norm(y) + share * v) * gate, with the LayerNorm of a head.
inline void finish(const WkvToken& t, const WkvHead& head, float share, float eps, int64_t dim) {
  vf total = zero(), squares = zero();
  for (int64_t d = 0; d < dim; d += W) total = add(total, load(t.y + d));
  const vf mean = set1(sum(total) / static_cast<float>(dim));
  for (int64_t d = 0; d < dim; d += W) {
    const vf centred = sub(load(t.y + d), mean);
    squares = fma(centred, centred, squares);
  }
  const vf factor = set1(1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(dim) + eps));
  for (int64_t d = 0; d < dim; d += W) {
    const vf normed = fma(mul(sub(load(t.y + d), mean), factor), load(head.norm + d), load(head.norm_bias + d));
    store(t.y + d, mul(fma(set1(share), load(t.v + d), normed), load(t.g + d)));
  }
}

inline void wkv(const WkvToken& t, const WkvHead& head, float eps, int64_t dim, float* state, float* scratch) {
  const WkvChange change{scratch, scratch + dim, scratch + 2 * dim, scratch + 3 * dim};
  const float share = change_of(t, head, dim, change);
  for (int64_t row = 0; row < dim; row += 4) change_rows<4>(t, change, dim, row, state);
  finish(t, head, share, eps, dim);
}

inline void interpolate(const float* x, const float* before, const float* share, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += W) {
    const int64_t here = n - i < W ? n - i : W;
    const vf from = load_first(x + i, here);
    const vf change = mul(sub(load_first(before + i, here), from), load_first(share + i, here));
    store_first(out + i, add(from, change), here);
  }
}

inline void multiply_pairs(const float* a, const float* b, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += W) {
    const int64_t here = n - i < W ? n - i : W;
    store_first(out + i, mul(load_first(a + i, here), load_first(b + i, here)), here);
  }
}

}  // namespace headrace::HEADRACE_ISA
