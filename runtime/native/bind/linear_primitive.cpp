// Graph nodes of projections and norms (linear_primitive.h). A node dispatches one task; the task runs on the stream's thread and the pool.
#include "linear_primitive.h"

#include <stdexcept>
#include <utility>

#include "../core/linear.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"
#include "node.h"
#include "strided.h"
#include "weight_arena.h"

namespace headrace {
namespace {

// Inputs: x, then the norm weight and the residual where present.
class Linear : public Node {
 public:
  Linear(mx::Stream stream, std::shared_ptr<MatrixHandle> w, bool norm, float eps, bool residual, Act act, const Curve& curve, int rounding)
      : Node(stream), w_(std::move(w)), norm_(norm), eps_(eps), residual_(residual), act_(act), curve_(curve), rounding_(rounding) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    mx::array& out = outputs[0];
    out.set_data(allocated(out.nbytes()));
    if (out.size() == 0) return;
    LinearCall call;
    call.rows = static_cast<int64_t>(inputs[0].size()) / w_->view().k;
    call.eps = eps_;
    call.w = w_->view();
    call.act = act_;
    call.curve = curve_;
    call.out = out.data<float>();
    std::vector<Rows> rows(inputs.begin(), inputs.end());
    // LinearCall::prompts, owned by the task. This call knows no phases, so rounding_ holds for every row; 16 bits need no marks.
    std::vector<uint8_t> rounded(rounding_ == 16 ? 0 : static_cast<size_t>(call.rows), 1);
    call.rounding = rounding_;
    auto task = [call, w = w_, rounded = std::move(rounded), norm = norm_, residual = residual_, rows = std::move(rows)]() mutable {
      std::vector<char> copies[3];
      call.x = rows[0].read<float>(copies[0]);
      if (norm) call.norm = rows[1].read<float>(copies[1]);
      if (residual) call.residual = rows.back().read<float>(copies[2]);
      if (!rounded.empty()) call.prompts = rounded.data();
      run_linear(Pool::shared(), best_kernels(), call);
    };
    mx::cpu::get_command_encoder(stream()).dispatch(std::move(task));
  }

  const char* name() const override { return "HeadraceLinear"; }

 private:
  std::shared_ptr<MatrixHandle> w_;
  bool norm_;
  float eps_;
  bool residual_;
  Act act_;
  Curve curve_;
  int rounding_;
};

// Inputs: x, the weight, and the bias of a LayerNorm where present.
class Norm : public Node {
 public:
  Norm(mx::Stream stream, float eps, bool centred) : Node(stream), eps_(eps), centred_(centred) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    mx::array& out = outputs[0];
    out.set_data(allocated(out.nbytes()));
    if (out.size() == 0) return;
    const int64_t k = inputs[0].shape(-1);
    const int64_t count = static_cast<int64_t>(inputs[0].size()) / k;
    std::vector<Rows> rows(inputs.begin(), inputs.end());
    auto task = [rows = std::move(rows), count, k, eps = eps_, centred = centred_, to = out.data<float>()] {
      std::vector<char> copies[3];
      const float *x = rows[0].read<float>(copies[0]), *weight = rows[1].read<float>(copies[1]);
      if (!centred) return run_rms_norm(Pool::shared(), best_kernels(), x, count, k, weight, eps, to);
      const float* bias = rows.size() > 2 ? rows[2].read<float>(copies[2]) : nullptr;
      run_layer_norm(Pool::shared(), best_kernels(), x, count, k, weight, bias, eps, to);
    };
    mx::cpu::get_command_encoder(stream()).dispatch(std::move(task));
  }

  const char* name() const override { return "HeadraceNorm"; }

 private:
  float eps_;
  bool centred_;
};

void require_floats(const mx::array& x, int64_t last) {
  if (x.dtype() != mx::float32) throw std::invalid_argument("activations must be float32");
  if (x.ndim() == 0 || x.shape(-1) != last) throw std::invalid_argument("the last axis does not fit the weight");
}

mx::array norm_weight(const mx::array& a, int64_t width) {
  if (a.shape() != mx::Shape{static_cast<int>(width)}) throw std::invalid_argument("a norm must be as wide as its input");
  return a.dtype() == mx::float32 ? a : mx::astype(a, mx::float32, cpu_stream());
}

}  // namespace

mx::array linear(const mx::array& x, const std::shared_ptr<MatrixHandle>& w, const std::optional<mx::array>& norm,
                 float eps, const std::optional<mx::array>& residual, const std::string& activation, int rounding,
                 const CurveNumbers& curve) {
  const Matrix& view = w->view();
  const Act act = activation.empty() ? Act::none : activation_of(activation);
  const Curve numbers = curve_of(act, curve);
  require_floats(x, view.k);
  if (rounding != 16 && rounding != 8 && (rounding != kHalves || best_kernels().multiply_tiles == nullptr)) {
    throw std::invalid_argument("these kernels round activations to 16 or 8 bits");
  }
  if (gates(act) && (view.n % 2 != 0 || residual.has_value())) {
    throw std::invalid_argument("a gated unit needs gate and up rows, and takes no residual");
  }
  mx::Shape shape = x.shape();
  shape.back() = static_cast<int>(gates(act) ? view.n / 2 : view.n);
  std::vector<mx::array> inputs{x};
  if (norm.has_value()) inputs.push_back(norm_weight(*norm, view.k));
  if (residual.has_value()) {
    require_floats(*residual, view.n);
    if (residual->shape() != shape) throw std::invalid_argument("the residual must have the product's shape");
    inputs.push_back(*residual);
  }
  auto node = std::make_shared<Linear>(cpu_stream(), w, norm.has_value(), eps, residual.has_value(), act, numbers, rounding);
  return mx::array(std::move(shape), mx::float32, std::move(node), std::move(inputs));
}

mx::array rms_norm(const mx::array& x, const mx::array& weight, float eps) {
  require_floats(x, x.ndim() == 0 ? 0 : x.shape(-1));
  auto node = std::make_shared<Norm>(cpu_stream(), eps, false);
  return mx::array(x.shape(), mx::float32, std::move(node), {x, norm_weight(weight, x.shape(-1))});
}

mx::array layer_norm(const mx::array& x, const mx::array& weight, const std::optional<mx::array>& bias, float eps) {
  require_floats(x, x.ndim() == 0 ? 0 : x.shape(-1));
  std::vector<mx::array> inputs{x, norm_weight(weight, x.shape(-1))};
  if (bias.has_value()) inputs.push_back(norm_weight(*bias, x.shape(-1)));
  auto node = std::make_shared<Norm>(cpu_stream(), eps, true);
  return mx::array(x.shape(), mx::float32, std::move(node), std::move(inputs));
}

}  // namespace headrace
