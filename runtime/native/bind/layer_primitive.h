// All decoder layers as one node of MLX's lazy graph.
//
// The node runs the calls of each layer in a single task, with intermediate rows in the task's buffers. A plain layer
// has five: qkv (one for each format of its parts), attention, output, gate_up and down. Five nodes per layer cost more in graph building and dispatch
// than attention, and fill MLX's queue, so that no step could be built ahead.
//
// A new kind of layer is a call in run_layer, and a parameter of LayerPlan, whose constructor checks the shapes. Python
// passes parameters by position, so a new one has the same place (best the last) in
//   - LayerPlan's constructor, here and in layer_primitive.cpp,
//   - bind/module.cpp: the lambda's parameters, its call of LayerPlan, and the list of names,
//   - `LayerPlan.__init__` in runtime/_native.pyi,
//   - the call of `kernels.LayerPlan` in `layer_plan()` of runtime/ops/native_plans.py. `_runs_by_operations` there
//     must not refuse such layers.
// A new norm is a field of LayerNorms, in the same order in module.cpp, _native.pyi and `_layer_norms()` of
// native_plans.py, and a pointer of LayerPlan.
//
// Guard: tests/runtime/ops/test_passes.py (a network together and alone); tests/parity/test_numpy_decoder.py.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "attend_primitive.h"
#include "experts_primitive.h"
#include "matrix_handle.h"
#include "mixer_primitive.h"
#include "mlx/array.h"
#include "peer_primitive.h"

namespace headrace {

// Norms (E) of a layer, where it has them, and a factor (1) of its output.
struct LayerNorms {
  std::optional<mx::array> input, attention_post, mlp, mlp_post, after_dense, before_experts, after_experts, scalar;
};

// gate (P, E), projection (E, P) and norm (E) of a layer with an input of its own (P): x + norm(projection @ (gelu(gate @ x) * input)).
using OwnInput = std::tuple<std::shared_ptr<MatrixHandle>, std::shared_ptr<MatrixHandle>, mx::array>;

// Two matrices: `gate` and `down_gate`, each may be nullptr; or `mixer_in` and `mixer_out`.
using Gates = std::pair<std::shared_ptr<MatrixHandle>, std::shared_ptr<MatrixHandle>>;

using Matrices = std::vector<std::shared_ptr<MatrixHandle>>;

// x + attention(norm(x)), or a recurrent mixer in its place or, with `mixer_in` and `mixer_out`, beside it; then + feed-forward(norm(x)),
// if there is one. Each half has a further norm behind it where there is one. The feed-forward is one unit (`gate_up` and `down`),
// `experts`, or both added. A `gate` multiplies what attention returns, and the single row of a `down_gate` what `down` does, by the
// sigmoid of its product with norm(x).
class LayerPlan : public std::enable_shared_from_this<LayerPlan> {
 public:
  // Throws std::invalid_argument for inconsistent shapes.
  LayerPlan(std::shared_ptr<AttentionPlan> attention, Matrices qkv, std::shared_ptr<MatrixHandle> output,
            std::shared_ptr<MatrixHandle> gate_up, std::shared_ptr<MatrixHandle> down, float eps, const std::string& activation,
            std::shared_ptr<ExpertsPlan> experts, std::shared_ptr<MixerPlan> mixer, Gates gates, const LayerNorms& norms,
            const std::optional<OwnInput>& own_input, const std::optional<Gates>& mixer_ends = std::nullopt,
            const CurveNumbers& curve = std::nullopt);

  // Whether the layer needs rows (N, E) for a result that is normalized before it is added: of attention, of the
  // feed-forward, or of the layer's own input.
  bool has_branch() const { return attention_post != nullptr || mlp_post != nullptr || own_gate != nullptr; }

  // E, and the numbers of a row of all `qkv`.
  int64_t width() const { return qkv.front()->view().k; }
  int64_t projected() const;

  // Parameters of a task. E = width, F = feed-forward size. `qkv` are the projections into attention, several where their formats differ,
  // with their results side by side; or one into the mixer.
  // Matrices, plans and norms that a layer lacks are nullptr. The constructor's body sets the norms; `after_input`, of
  // an own input, stays nullptr without one.
  std::shared_ptr<AttentionPlan> attention;
  Matrices qkv;
  std::shared_ptr<MatrixHandle> output, gate_up, down;
  std::shared_ptr<ExpertsPlan> experts;
  std::shared_ptr<MixerPlan> mixer;
  std::shared_ptr<MatrixHandle> gate, down_gate, mixer_in, mixer_out, own_gate, own_projection;
  const float *input_norm, *attention_post, *mlp_norm, *mlp_post, *after_dense, *before_experts, *after_experts;
  const float* after_input = nullptr;
  float eps, scalar = 1.0f;
  Act act;
  Curve curve;

 private:
  const float* keep(const std::optional<mx::array>& norm);

  std::vector<mx::array> kept_;
};

// x (B, T, E) float32; keys, values: per layer (B, Hkv, capacity, D), written in place, their first rows the positions
// `firsts` (empty: 0) -> x (B, T, E). With layers that have an input of their own, the input x has those of all layers behind its E
// numbers. `prefill`: prompt tokens. `rounding`: bits of prompts' rows, 16 or 8, in products with the weights of attention and of a dense
// feed-forward; for 16 they are in halves where there are tiles. wanted: rows of the result, the first of x; all if negative. Other rows
// append K/V and advance states. peer: the rank with the other part of each layer; both parts are summed behind attention and feed-forward,
// and rank 0's has the residual.
mx::array layers(const mx::array& x, const std::vector<mx::array>& keys, const std::vector<mx::array>& values, int offset,
                 const std::vector<std::shared_ptr<LayerPlan>>& plans, const std::vector<int>& firsts, bool prefill,
                 int rounding, int wanted = -1, const std::shared_ptr<Peer>& peer = nullptr);

// The same for the rows of a pass, (1, N, E). places: per layer its group and index in the group. states: of each layer with a mixer,
// one per sequence. Returns x; then for each such layer the new states, and the inputs (1, `kept`, projected) of its first rows, if any
// are kept.
std::vector<mx::array> layers_pass(const mx::array& x, const std::shared_ptr<Pass>& pass,
                                   const std::vector<std::pair<int, int>>& places,
                                   const std::vector<std::shared_ptr<LayerPlan>>& plans,
                                   const std::vector<std::vector<mx::array>>& states, int kept, int rounding,
                                   int wanted = -1, const std::shared_ptr<Peer>& peer = nullptr);

}  // namespace headrace
