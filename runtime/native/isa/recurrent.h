// Recurrences with a matrix as a head's state, and causal convolutions of each channel by itself.
#pragma once

#include "elementwise.h"

namespace headrace::HEADRACE_ISA {

// R rows of the state with one token. with: q . k.
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

inline void decays(const float* x, const float* bias, float rate, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += W) {
    const int64_t here = n - i < W ? n - i : W;
    const vf v = add(load_first(x + i, here), load_first(bias + i, here)), positive = max(v, zero());
    const vf softplus = add(positive, log_of_more(exp(sub(v, add(positive, positive)))));  // of -|v|
    store_first(out + i, exp(mul(set1(rate), softplus)), here);
  }
}

inline void multiply_pairs(const float* a, const float* b, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += W) {
    const int64_t here = n - i < W ? n - i : W;
    store_first(out + i, mul(load_first(a + i, here), load_first(b + i, here)), here);
  }
}

}  // namespace headrace::HEADRACE_ISA
