// A whole layer's recurrent token mixing, between its two projections, for the rows of several sequences: gated delta networks
// (arXiv:2412.06464), with a decay of each key's channel (arXiv:2510.26692), Mamba-2 (arXiv:2405.21060), gated short convolutions (LFM2),
// the selective scan of Mamba (arXiv:2312.00752), RWKV-7 (arXiv:2503.14456) and the shifts before it.
//
// Tokens are taken one by one, so that a token's bits depend neither on how a prompt is cut nor on other sequences.
#pragma once

#include "kernels.h"
#include "pool.h"

namespace headrace {

enum class MixerKind : uint8_t { delta, kda, ssm, conv, scan, wkv, shift };

// A layer's sizes and vectors, for every kind (runtime.ops.mixers.MixerSpec). Hv = heads, Hk = key_heads, Dk = dim, Dv = rows,
// C = channels().
//
//   kind   projected row                                  heads    key_heads   dim   rows  width    state of a sequence
//   delta  [q k v (C) | z (Hv Dv) | b (Hv) | a (Hv)]      Hv       divides Hv  16 i  Dv    1 to 16  (width - 1, C), then (Hv, Dv, Dk)
//   kda    [q k v (C) | z (Hv Dv) | b (Hv) | a (Hv Dk)]   Hv       divides Hv  16 i  Dv    1 to 16  (width - 1, C), then (Hv, Dv, Dk)
//   ssm    [C B x (C) | z (Hv Dv) | a (Hv)]               Hv       divides Hv  16 i  Dv    1 to 16  (width - 1, C), then (Hv, Dv, Dk)
//   conv   [B | C | x] (E each); x alone if not gated     1        0           any   E     1 to 16  (width - 1, E)
//   scan   [x | z | step (Hv each) | B | C (Dk each)]     Hv       1           >= 1  1     1        (Hv, 1, Dk)
//   wkv    [r | w | k | v | a | g] (Hv Dk each), and *    Hv       Hv          16 i  Dk    1        (Hv, Dk, Dk)
//   shift  x (E)                                          results  0           0     E     2        (1, E): the row before
//
// C convolved channels are q and k of Hk heads of Dk each, and v of Hv heads of Dv; Mamba-2 (ssm) names these three C, B and x. "16 i": a
// multiple of 16. *: with mixes_values two more parts, the values of the first layer and the logits of their shares.
// A row of the result has Hv * Dv numbers; of a shift each of Hv results lies between the row and the one before.
// bind/mixer_primitive.cpp checks the sizes and vectors.
//
//   kind        fields that it reads, besides sizes                                                 gates_at, steps_at  betas_at
//   delta, kda  taps, tap_bias, rate, step_bias, most_beta, q_scale, k_scale, skip, norm*, eps      valid               valid
//   ssm         taps, tap_bias, rate, step_bias, least_step, most_step, skip, norm*, eps            valid               meaningless
//   conv        taps, tap_bias, gated, act if not gated                                             meaningless         meaningless
//   scan        rate, skip                                                                          meaningless         meaningless
//   wkv         wkv, eps, mixes_values                                                              meaningless         meaningless
//   shift       taps                                                                                meaningless         meaningless
//
// The formulas are in runtime/ops/recurrent.py (MLX) and in runtime/native/tests/mixer.cpp (double precision).
// Guard: runtime/native/tests/mixer.cpp; tests/runtime/ops/test_native_recurrent.py compares with runtime/ops/recurrent.py.
struct MixerShape {
  MixerKind kind = MixerKind::conv;
  int64_t heads = 1, key_heads = 0, dim = 0, rows = 0;  // Hv, Hk, Dk, Dv
  int64_t width = 1;                 // tokens that the convolution sees
  const float* taps = nullptr;       // (width, C); of a shift (Hv, E), shares of the row before
  const float* tap_bias = nullptr;   // (C) or nullptr
  bool gated = true;                 // a short convolution has B and C
  Act act = Act::none;               // of one that has not
  const float* rate = nullptr;       // (Hv) of decay, (Hv, Dk) of a scan: -exp(A_log)
  const float* step_bias = nullptr;  // added to a
  float most_beta = 1.0f;            // times the sigmoid of b
  float least_step = 0, most_step = 0;  // bounds of the step after its softplus
  const float* skip = nullptr;       // (Hv) of v in y, or nullptr
  const float* norm = nullptr;       // RMSNorm of y in parts of norm_size, or nullptr: (Dv) if norm_each, else (Hv * Dv)
  int64_t norm_size = 0;
  bool norm_each = false;            // the same for each head
  bool norm_first = false;           // before the gate, norm_each only; else behind it
  float eps = 0;                     // of the norm
  const float* q_scale = nullptr;    // (Dk) factors of normalized q and k, delta rule only
  const float* k_scale = nullptr;
  bool mixes_values = false;         // with those of the first layer, RWKV-7 only
  WkvHead wkv{};                     // of the first head; (Hv, Dk) each, RWKV-7 only

  // Numbers of a row of the result.
  int64_t inner() const { return heads * rows; }
  int64_t channels() const { return kind == MixerKind::shift ? rows : 2 * key_heads * dim + inner(); }
  // Indices of z, b and a in a projected row, for the kinds of the table.
  int64_t gates_at() const { return channels(); }
  int64_t betas_at() const { return channels() + inner(); }
  bool by_rule() const { return kind == MixerKind::delta || kind == MixerKind::kda; }
  // Numbers of a for a head.
  int64_t head_decays() const { return kind == MixerKind::kda ? dim : 1; }
  int64_t steps_at() const { return betas_at() + (by_rule() ? heads : 0); }
  bool convolves() const { return kind != MixerKind::scan && kind != MixerKind::wkv && kind != MixerKind::shift; }
  // Numbers of a projected row.
  int64_t projected() const {
    switch (kind) {
      case MixerKind::conv: return gated ? 3 * rows : rows;
      case MixerKind::scan: return 3 * heads + 2 * dim;
      case MixerKind::wkv: return (mixes_values ? 8 : 6) * heads * dim;
      case MixerKind::shift: return rows;
      default: return steps_at() + heads * head_decays();
    }
  }
  // Floats of a sequence's state: the inputs of the convolution, with which it begins, and all.
  int64_t taps_floats() const { return (width - 1) * channels(); }
  int64_t state_floats() const { return taps_floats() + (kind == MixerKind::conv ? 0 : inner() * dim); }
};

// A sequence's rows [row, row + count) and its state: (width - 1, C) inputs of the convolution, oldest first, then (Hv, Dv, Dk).
struct MixerRows {
  int64_t row = 0, count = 0;
  const float* state = nullptr;  // (state_floats()) before the first row
  float* out_state = nullptr;    // (state_floats()) after the last row; other memory
};

// Rows of several sequences, each with a state.
struct MixerCall {
  MixerShape shape;
  const float* x = nullptr;  // (N, projected)
  int64_t tokens = 0;        // N
  const MixerRows* sequences = nullptr;
  int64_t count = 0;         // of sequences
  float* out = nullptr;      // (N, Hv * Dv)
};

void run_mixer(Pool& pool, const Kernels& kernels, const MixerCall& call);

}  // namespace headrace
