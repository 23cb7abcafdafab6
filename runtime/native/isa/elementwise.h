// Row-wise arithmetic beside the products: normalisation, gating, conversions.
//
// Functions take contiguous rows of any length (n or k floats); the contracts of those in the table are in core/kernels.h.
// Guard: runtime/native/tests/rows.cpp, at every length around a vector's; packed.cpp for hadamard.
#pragma once

#include <utility>

#include "../core/half.h"
#include "simd.h"

namespace headrace::HEADRACE_ISA {

// out (k) = x * weight / sqrt(mean of x^2 + eps). Four sums, so that no addition waits for the one before. out may be x.
inline void rms_norm(const float* x, const float* weight, float eps, int64_t k, float* out) {
  vf squares[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 4 * W <= k; i += 4 * W) {
    for (int j = 0; j < 4; ++j) {
      const vf v = load(x + i + j * W);
      squares[j] = fma(v, v, squares[j]);
    }
  }
  for (; i < k; i += W) {
    const vf v = load_first(x + i, k - i < W ? k - i : W);
    squares[0] = fma(v, v, squares[0]);
  }
  const float total = sum(add(add(squares[0], squares[1]), add(squares[2], squares[3])));
  const vf factor = set1(1.0f / __builtin_sqrtf(total / static_cast<float>(k) + eps));
  for (i = 0; i + W <= k; i += W) store(out + i, mul(mul(load(x + i), factor), load(weight + i)));
  if (i < k) {
    const int64_t n = k - i;
    store_first(out + i, mul(mul(load_first(x + i, n), factor), load_first(weight + i, n)), n);
  }
}

// out (k): x minus its mean, through rms_norm, plus bias (k) or nothing. The variance is the mean square of what is centred.
inline void layer_norm(const float* x, const float* weight, const float* bias, float eps, int64_t k, float* out) {
  vf sums[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 4 * W <= k; i += 4 * W) {
    for (int j = 0; j < 4; ++j) sums[j] = add(sums[j], load(x + i + j * W));
  }
  for (; i < k; i += W) sums[0] = add(sums[0], load_first(x + i, k - i < W ? k - i : W));
  const vf mean = set1(sum(add(add(sums[0], sums[1]), add(sums[2], sums[3]))) / static_cast<float>(k));
  for (i = 0; i < k; i += W) {
    const int64_t here = k - i < W ? k - i : W;
    store_first(out + i, sub(load_first(x + i, here), mean), here);
  }
  rms_norm(out, weight, eps, k, out);
  if (bias == nullptr) return;
  for (i = 0; i < k; i += W) {
    const int64_t here = k - i < W ? k - i : W;
    store_first(out + i, add(load_first(out + i, here), load_first(bias + i, here)), here);
  }
}

inline vf sigmoid(vf x) { return div(set1(1.0f), add(set1(1.0f), exp(sub(zero(), x)))); }

inline vf silu(vf x) { return div(x, add(set1(1.0f), exp(sub(zero(), x)))); }

// The tanh approximation of GELU (Hendrycks and Gimpel, arXiv:1606.08415).
inline vf gelu(vf x) {
  const vf cube = mul(mul(x, x), x);
  const vf inner = mul(set1(0.7978845608f), fma(set1(0.044715f), cube, x));
  return mul(mul(set1(0.5f), x), add(set1(1.0f), tanh(inner)));
}

// GPT-OSS: x sigmoid(1.702 x) with x = min(gate, 7), times clamp(up, -7, 7) + 1. The order of operands keeps NaN.
inline vf clamped(vf gate, vf up) {
  gate = min(set1(7.0f), gate);
  up = max(set1(-7.0f), min(set1(7.0f), up));
  return mul(div(gate, add(set1(1.0f), exp(mul(gate, set1(-1.702f))))), add(up, set1(1.0f)));
}

// e^x - 1 - x for x <= 0: its series down to -1/4, where the difference cancels.
inline vf beyond_linear(vf x) {
  vf series = fma(set1(1.0f / 720), x, set1(1.0f / 120));
  series = fma(series, x, set1(1.0f / 24));
  series = fma(series, x, set1(1.0f / 6));
  series = fma(series, x, set1(0.5f));
  const vf near = unless_below(x, -0.25f, mul(mul(x, x), series));
  return add(near, where_above(sub(zero(), x), 0.249999985f, sub(sub(exp(x), set1(1.0f)), x)));  // from 1/4 on
}

// x (n) in place; the formula is at Curve. `above` is 0 for v <= 0, and `below` for normal numbers above 0; NaN stays NaN.
inline void xielu(const Curve& curve, int64_t n, float* x) {
  for (int64_t i = 0; i < n; i += W) {
    const int64_t here = n - i < W ? n - i : W;
    const vf v = load_first(x + i, here), low = min(v, set1(curve.eps));
    const vf above = where_above(v, 0.0f, mul(mul(v, v), set1(curve.positive)));
    const vf rest = mul(add(beyond_linear(low), sub(low, v)), set1(curve.negative));
    const vf below = unless_below(sub(zero(), v), -__FLT_MIN__, rest);
    store_first(x + i, fma(v, set1(curve.beta), add(above, below)), here);
  }
}

inline void gated(const float* gate, const float* up, int64_t n, Act act, float* out) {
  for (int64_t i = 0; i < n; i += W) {
    const int64_t here = n - i < W ? n - i : W;
    const vf g = load_first(gate + i, here);
    const vf u = up == nullptr ? set1(1.0f) : load_first(up + i, here);
    const vf activated = act == Act::silu ? silu(g) : act == Act::gelu ? gelu(g) : sigmoid(g);
    store_first(out + i, act == Act::clamped ? clamped(g, u) : mul(activated, u), here);
  }
}

// n numbers of a type from `src` on, as floats.
inline void to_float(const void* src, Type type, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += W) {
    const int64_t here = n - i < W ? n - i : W;
    store_first(out + i, load_first_any(src, type, i, here), here);
  }
}

// n floats as numbers of a type, f32, f16 or bf16, rounded to nearest even.
inline void from_float(const float* src, int64_t n, Type type, void* out) {
  for (int64_t i = 0; i < n; i += W) {
    const int64_t here = n - i < W ? n - i : W;
    const vf v = load_first(src + i, here);
    if (type == Type::f32) {
      store_first(static_cast<float*>(out) + i, v, here);
    } else if (type == Type::f16) {
      store_first_f16(static_cast<uint16_t*>(out) + i, v, here);
    } else {
      alignas(64) float plain[W];
      store(plain, v);
      for (int64_t j = 0; j < here; ++j) static_cast<uint16_t*>(out)[i + j] = f32_to_bf16(plain[j]);
    }
  }
}

// Lane i becomes the sum of lanes i and i ^ Step, or their difference where i has that bit.
template <int Step, int... Lane>
inline vf butterfly(vf x, std::integer_sequence<int, Lane...>) {
  alignas(64) static constexpr float kSigns[W] = {((Lane & Step) != 0 ? -1.0f : 1.0f)...};
  return fma(x, load(kSigns), __builtin_shufflevector(x, x, (Lane ^ Step)...));
}

// All steps within a vector: Step, 2 Step, ... below W.
template <int Step>
inline vf butterflies(vf x) {
  x = butterfly<Step>(x, std::make_integer_sequence<int, W>());
  if constexpr (2 * Step < W) return butterflies<2 * Step>(x);
  return x;
}

// x (dim) in place, dim a multiple of 16, in parts of `size`, the largest power of two that divides it. Steps of W and more combine
// vectors, the others lanes of a vector. The factor makes the transform orthogonal, and so its own inverse.
inline void hadamard(float* x, int64_t dim) {
  const int64_t size = dim & -dim;
  for (int64_t step = W; step < size; step *= 2) {
    for (int64_t i = 0; i < dim; i += W) {
      if ((i & step) != 0) continue;
      const vf a = load(x + i), b = load(x + i + step);
      store(x + i, add(a, b));
      store(x + i + step, sub(a, b));
    }
  }
  const vf factor = set1(1.0f / __builtin_sqrtf(static_cast<float>(size)));
  for (int64_t i = 0; i < dim; i += W) store(x + i, mul(butterflies<1>(load(x + i)), factor));
}

// acc (n) in place.
inline void rescale(float* acc, float factor, int64_t n) {
  for (int64_t i = 0; i < n; ++i) acc[i] *= factor;
}

}  // namespace headrace::HEADRACE_ISA
