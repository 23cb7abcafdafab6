// All decoder layers as one node of MLX's lazy graph.
//
// The node runs the five calls of each layer in a single task, with intermediate rows in the task's buffers. Five nodes per layer cost
// more in graph building and dispatch than attention, and fill MLX's queue, so that no step could be built ahead.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "attend_primitive.h"
#include "experts_primitive.h"
#include "matrix_handle.h"
#include "mixer_primitive.h"
#include "mlx/array.h"

namespace headrace {

// The plain pre-norm layer: x + attention(norm(x)), or a recurrent mixer in its place or, with `mixer_in` and `mixer_out`, beside it;
// then + feed-forward(norm(x)), if there is one. The feed-forward is one unit (`gate_up` and `down`), `experts`, or both added. A `gate`
// multiplies what attention returns, and the single row of a `down_gate` what `down` does, by the sigmoid of its product with norm(x).
class LayerPlan : public std::enable_shared_from_this<LayerPlan> {
 public:
  // Throws std::invalid_argument for inconsistent shapes.
  LayerPlan(std::shared_ptr<AttentionPlan> attention, const mx::array& input_norm, std::shared_ptr<MatrixHandle> qkv,
            std::shared_ptr<MatrixHandle> output, const std::optional<mx::array>& mlp_norm, std::shared_ptr<MatrixHandle> gate_up,
            std::shared_ptr<MatrixHandle> down, float eps, const std::string& activation,
            std::shared_ptr<ExpertsPlan> experts, std::shared_ptr<MixerPlan> mixer = nullptr,
            std::shared_ptr<MatrixHandle> gate = nullptr, std::shared_ptr<MatrixHandle> down_gate = nullptr,
            std::shared_ptr<MatrixHandle> mixer_in = nullptr, std::shared_ptr<MatrixHandle> mixer_out = nullptr);

  // Parameters of a task. E = width, F = feed-forward size. `qkv` are the projections into attention or into the mixer.
  std::shared_ptr<AttentionPlan> attention;
  std::shared_ptr<MatrixHandle> qkv, output, gate_up, down;
  std::shared_ptr<ExpertsPlan> experts;
  std::shared_ptr<MixerPlan> mixer;
  std::shared_ptr<MatrixHandle> gate, down_gate, mixer_in, mixer_out;
  const float *input_norm, *mlp_norm;
  float eps;
  Act act;

 private:
  mx::array norms_[2];
};

// x (B, T, E) float32; keys, values: per layer (B, Hkv, capacity, D), written in place, their first rows the positions
// `firsts` (empty: 0) -> x (B, T, E). `prefill`: prompt tokens.
mx::array layers(const mx::array& x, const std::vector<mx::array>& keys, const std::vector<mx::array>& values, int offset,
                 const std::vector<std::shared_ptr<LayerPlan>>& plans, const std::vector<int>& firsts, bool prefill);

// The same for the rows of a pass, (1, N, E). places: per layer its group and index in the group. states: of each layer with a mixer,
// one per sequence. Returns x; then for each such layer the new states, and the inputs (1, `kept`, projected) of its first rows, if any
// are kept.
std::vector<mx::array> layers_pass(const mx::array& x, const std::shared_ptr<Pass>& pass,
                                   const std::vector<std::pair<int, int>>& places,
                                   const std::vector<std::shared_ptr<LayerPlan>>& plans,
                                   const std::vector<std::vector<mx::array>>& states, int kept);

}  // namespace headrace
