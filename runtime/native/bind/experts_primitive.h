// A feed-forward of experts as a node of MLX's lazy graph. Guard: tests/runtime/ops/test_native_experts.py.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "../core/experts.h"
#include "matrix_handle.h"
#include "mlx/array.h"

namespace headrace {

// An activation by name. Throws std::invalid_argument for unknown ones.
Act activation_of(const std::string& name);

// The numbers of xIELU, in the order of Curve.
using CurveNumbers = std::optional<std::tuple<float, float, float, float>>;

// The curve of an activation. Throws std::invalid_argument if it has none and needs one.
Curve curve_of(Act act, const CurveNumbers& numbers);

class ExpertsPlan : public std::enable_shared_from_this<ExpertsPlan> {
 public:
  // Stacks have as many matrices as the router has rows. Throws std::invalid_argument for inconsistent shapes, and for
  // matrices that are not filled (MatrixHandle::fill).
  ExpertsPlan(std::shared_ptr<MatrixHandle> router, std::shared_ptr<MatrixHandle> gate, std::shared_ptr<MatrixHandle> up,
              std::shared_ptr<MatrixHandle> down, int active, bool normalized, const std::string& activation, RouterRule rule = {},
              const std::optional<mx::array>& correction = std::nullopt, const std::optional<mx::array>& router_norm = std::nullopt,
              const std::optional<mx::array>& expert_scale = std::nullopt, bool residual = true);

  // Everything but rows, norm and output.
  const ExpertsCall& call() const { return call_; }

 private:
  ExpertsCall call_;
  std::shared_ptr<MatrixHandle> router_, gate_, up_, down_;
  const float* keep(const std::optional<mx::array>& vector, int64_t size, const char* problem);

  std::vector<mx::array> vectors_;
};

// x + the experts' output for norm(x), or without x if the plan has no residual. x (..., E) float32 -> the same shape.
mx::array experts(const mx::array& x, const mx::array& norm, float eps, const std::shared_ptr<ExpertsPlan>& plan);

// Products of rows x (M, K) float32 with matrices of a stack of `experts`, (N, K) each. indices: experts of the rows in turn, as many
// for each -> (indices' shape, N).
mx::array expert_linear(const mx::array& x, const mx::array& indices, const std::shared_ptr<MatrixHandle>& w, int experts);

}  // namespace headrace
