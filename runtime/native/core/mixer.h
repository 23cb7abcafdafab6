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

// Parameters: runtime.ops.mixers.MixerSpec. A projected row is [mixed | z | b | a]: the C convolved channels (q and k of Hk heads of Dk, v
// of Hv heads of Dv), gates z (Hv * Dv), with the delta rule also b (Hv), and a (Hv), of kda (Hv * Dk). Of a short convolution it is [B | C | x], E each,
// with E = Dv and one head, or x alone where it has no gates. Three kinds have no convolution: of a scan it is [x | z | step | B | C] with Hv channels, Dv = 1, B and C of Dk; of
// RWKV-7 [r | w | k | v | a | g], Hv * Dk each, with Dv = Dk, and if it mixes values also those of the first layer, and the logits of
// their shares. Of a shift it is x (E), with E = Dv: each of Hv results lies between the
// row and the one before.
struct MixerShape {
  MixerKind kind = MixerKind::conv;
  int64_t heads = 1, key_heads = 0, dim = 0, rows = 0;  // Hv, Hk, Dk (a multiple of 16, but for a scan), Dv
  int64_t width = 1;                 // tokens that the convolution sees
  const float* taps = nullptr;       // (width, C); of a shift (Hv, E), shares of the row before
  const float* tap_bias = nullptr;   // (C) or nullptr
  bool gated = true;                 // a short convolution has B and C
  Act act = Act::none;               // of one that has not
  const float* rate = nullptr;       // (Hv) of decay, (Hv, Dk) of a scan: -exp(A_log)
  const float* step_bias = nullptr;  // added to a
  float most_beta = 1.0f;            // times the sigmoid of b
  float least_step = 0, most_step = 0;
  const float* skip = nullptr;       // (Hv) of v in y, or nullptr
  const float* norm = nullptr;       // RMSNorm of y in parts of norm_size, or nullptr: (Dv) if norm_each, else (Hv * Dv)
  int64_t norm_size = 0;
  bool norm_each = false;            // the same for each head
  bool norm_first = false;           // before the gate, norm_each only; else behind it
  float eps = 0;
  const float* q_scale = nullptr;    // (Dk) factors of normalized q and k, delta rule only
  const float* k_scale = nullptr;
  bool mixes_values = false;         // with those of the first layer, RWKV-7 only
  WkvHead wkv{};                     // of the first head; (Hv, Dk) each, RWKV-7 only

  int64_t inner() const { return heads * rows; }
  int64_t channels() const { return kind == MixerKind::shift ? rows : 2 * key_heads * dim + inner(); }
  int64_t gates_at() const { return channels(); }
  int64_t betas_at() const { return channels() + inner(); }
  bool by_rule() const { return kind == MixerKind::delta || kind == MixerKind::kda; }
  int64_t head_decays() const { return kind == MixerKind::kda ? dim : 1; }
  int64_t steps_at() const { return betas_at() + (by_rule() ? heads : 0); }
  bool convolves() const { return kind != MixerKind::scan && kind != MixerKind::wkv && kind != MixerKind::shift; }
  int64_t projected() const {
    switch (kind) {
      case MixerKind::conv: return gated ? 3 * rows : rows;
      case MixerKind::scan: return 3 * heads + 2 * dim;
      case MixerKind::wkv: return (mixes_values ? 8 : 6) * heads * dim;
      case MixerKind::shift: return rows;
      default: return steps_at() + heads * head_decays();
    }
  }
  int64_t taps_floats() const { return (width - 1) * channels(); }
  int64_t state_floats() const { return taps_floats() + (kind == MixerKind::conv ? 0 : inner() * dim); }
};

// A sequence's rows [row, row + count) and its state: (width - 1, C) inputs of the convolution, then (Hv, Dv, Dk).
struct MixerRows {
  int64_t row = 0, count = 0;
  const float* state = nullptr;
  float* out_state = nullptr;
};

struct MixerCall {
  MixerShape shape;
  const float* x = nullptr;  // (N, projected)
  int64_t tokens = 0;        // N
  const MixerRows* sequences = nullptr;
  int64_t count = 0;
  float* out = nullptr;      // (N, Hv * Dv)
};

void run_mixer(Pool& pool, const Kernels& kernels, const MixerCall& call);

}  // namespace headrace
