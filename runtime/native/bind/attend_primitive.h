// Attention with its cache write, as one node of MLX's lazy graph.
//
// B = batch, T = new tokens, N = rows of a pass, H and Hkv = query and key-value heads, D = head size, S = entries.
// Guard: tests/runtime/ops/test_native_kernels.py (attend), test_passes.py (attend_pass) and test_native_recurrent.py (given heads).
#pragma once

#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "../core/attend.h"
#include "cache_blocks.h"
#include "matrix_handle.h"
#include "mlx/array.h"

namespace headrace {

std::shared_ptr<Rope> make_rope(const mx::array& periods, float amplitude);

// Attention parameters of one layer: runtime.ops.weights.AttentionSpec.
// Shared like MatrixHandle, and for the same reason.
class AttentionPlan : public std::enable_shared_from_this<AttentionPlan> {
 public:
  AttentionPlan(int heads, int kv_heads, int dim, float scale, std::shared_ptr<Rope> rope,
                const std::optional<mx::array>& q_norm, const std::optional<mx::array>& k_norm, float norm_eps,
                std::optional<int> window, std::optional<float> softcap, const std::optional<mx::array>& sinks,
                bool norm_last = false, std::optional<std::tuple<float, int, int>> growth = std::nullopt,
                bool v_norm = false, int parts = 3, bool chunked = false);

  const AttendCall& call() const { return call_; }  // the part that is constant over steps

 private:
  const float* keep(const std::optional<mx::array>& vector, int64_t size);

  AttendCall call_;
  std::shared_ptr<Rope> rope_;
  std::vector<mx::array> vectors_;
};

// qkv (B, T, (H + 2 Hkv) * D) float32, or without the parts that the plan has none of; keys, values (B, Hkv, capacity, D), written in
// place -> out (B, T, H * D). `offset`: position of the first token; `first`: of the buffers' first row. `prefill`: prompt tokens.
mx::array attend(const mx::array& qkv, const mx::array& keys, const mx::array& values, int offset,
                 const std::shared_ptr<AttentionPlan>& plan, int first, bool prefill);

// The same for the rows of a pass, (1, N, .), over the blocks of the `index`-th layer of a group. With `appends_only` the result is zeros.
mx::array attend_pass(const mx::array& qkv, const std::shared_ptr<Pass>& pass, int group, int index,
                      const std::shared_ptr<AttentionPlan>& plan, bool appends_only = false);

// Heads x (B, H, T, D) float32, rotated at positions [offset, offset + T) -> the same shape. Throws std::invalid_argument for others.
mx::array rotate_heads(const mx::array& x, const std::shared_ptr<Rope>& rope, int offset);

// Attention of rotated queries q (B, H, T, D) float32, the last of S positions, over keys and values (B, Hkv, S, D), read in place if
// entries are contiguous -> (B, T, H, D) float32. mask: (B, 1, T, S) bool of visible entries, in prefill only; causal without. sinks (H).
// Throws std::invalid_argument for shapes and types that do not fit.
mx::array attend_heads(const mx::array& q, const mx::array& keys, const mx::array& values, float scale, bool prefill,
                       const std::optional<mx::array>& mask, const std::optional<mx::array>& sinks);

}  // namespace headrace
