// A layer's recurrent token mixing as a node of MLX's lazy graph: core/mixer.h has a table of kinds, shapes and fields.
//
// Guard: tests/runtime/ops/test_native_recurrent.py, also for sizes that do not fit.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../core/mixer.h"
#include "mlx/array.h"

namespace headrace {

namespace mx = mlx::core;

// Vectors of a mixer, float32; those that its kind lacks are absent.
struct MixerVectors {
  std::optional<mx::array> taps, tap_bias, rate, step_bias, skip, norm;
  std::vector<mx::array> wkv;  // in the order of WkvHead
};

// Parameters of one layer: runtime.ops.mixers.MixerSpec. Shared like MatrixHandle, and for the same reason.
class MixerPlan : public std::enable_shared_from_this<MixerPlan> {
 public:
  // Throws std::invalid_argument for unknown kinds and inconsistent shapes.
  //
  // steps: least and most of the step after its softplus, "ssm" only. silu: SiLU after a "conv" without gates.
  // Python's order is that of runtime/_native.pyi and module.cpp: this one, but with the vectors one by one in place of
  // `vectors`, and `wkv` after `most_beta`.
  MixerPlan(const std::string& kind, int heads, int key_heads, int dim, int rows, MixerVectors vectors, bool norm_first, float eps,
            std::pair<float, float> steps, float most_beta = 1.0f, bool gated = true, bool silu = false,
            bool mixes_values = false);

  const MixerShape& shape() const { return shape_; }

 private:
  const float* keep(const std::optional<mx::array>& vector, const mx::Shape& shape, bool needed);
  // Keeps the vectors of a scan, RWKV-7 or a shift.
  void keep_unconvolved(const MixerVectors& vectors);

  MixerShape shape_;
  std::vector<mx::array> vectors_;
  std::vector<float> scales_;  // (Dk) q_scale, then (Dk) k_scale; empty unless "delta" or "kda"
};

// x (1, N, projected) float32: rows of several sequences, `counts` of each; states: one of each, (state_floats). Returns y (1, N, Hv * Dv)
// and the new states. Throws std::invalid_argument for shapes that do not fit.
std::pair<mx::array, std::vector<mx::array>> mix_pass(const mx::array& x, const std::vector<mx::array>& states,
                                                      const std::vector<int>& counts, const std::shared_ptr<MixerPlan>& plan);

}  // namespace headrace
