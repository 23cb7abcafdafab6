// Graph nodes of experts: a feed-forward, and products with chosen matrices (experts_primitive.h).
#include "experts_primitive.h"

#include <stdexcept>
#include <utility>

#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "node.h"
#include "strided.h"
#include "weight_arena.h"

namespace headrace {
namespace {

void require(bool fits, const char* what) {
  if (!fits) throw std::invalid_argument(what);
}

// Inputs: x and the norm weight.
class Experts : public Node {
 public:
  Experts(mx::Stream stream, std::shared_ptr<ExpertsPlan> plan, float eps)
      : Node(stream), plan_(std::move(plan)), eps_(eps) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    mx::array& out = outputs[0];
    out.set_data(allocated(out.nbytes()));
    if (out.size() == 0) return;
    ExpertsCall call = plan_->call();
    call.rows = static_cast<int64_t>(out.size()) / call.router.k;
    call.eps = eps_;
    call.out = out.data<float>();
    auto task = [call, plan = plan_, x = Rows(inputs[0]), norm = Rows(inputs[1])]() mutable {
      std::vector<char> copies[2];
      call.x = x.read<float>(copies[0]);
      call.norm = norm.read<float>(copies[1]);
      run_experts(Pool::shared(), best_kernels(), call);
    };
    mx::cpu::get_command_encoder(stream()).dispatch(std::move(task));
  }

  const char* name() const override { return "HeadraceExperts"; }

 private:
  std::shared_ptr<ExpertsPlan> plan_;
  float eps_;
};

// Inputs: x and the indices.
class ExpertLinear : public Node {
 public:
  ExpertLinear(mx::Stream stream, std::shared_ptr<MatrixHandle> w, int64_t experts)
      : Node(stream), w_(std::move(w)), experts_(experts) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    mx::array& out = outputs[0];
    out.set_data(allocated(out.nbytes()));
    if (out.size() == 0) return;
    ExpertProducts call;
    call.w = w_->view();
    call.experts = experts_;
    call.pairs = static_cast<int64_t>(inputs[1].size());
    call.active = call.pairs * call.w.k / static_cast<int64_t>(inputs[0].size());
    call.out = out.data<float>();
    auto task = [call, w = w_, x = Rows(inputs[0]), indices = Rows(inputs[1])]() mutable {
      std::vector<char> copies[2];
      call.x = x.read<float>(copies[0]);
      call.chosen = indices.read<int32_t>(copies[1]);
      run_expert_products(Pool::shared(), best_kernels(), call);
    };
    mx::cpu::get_command_encoder(stream()).dispatch(std::move(task));
  }

  const char* name() const override { return "HeadraceExpertLinear"; }

 private:
  std::shared_ptr<MatrixHandle> w_;
  int64_t experts_;
};

}  // namespace

Act activation_of(const std::string& name) {
  if (name == "silu") return Act::silu;
  if (name == "gelu") return Act::gelu;
  if (name == "clamped") return Act::clamped;
  if (name == "sigmoid") return Act::sigmoid;
  if (name == "relu2") return Act::squared;
  if (name == "xielu") return Act::xielu;
  throw std::invalid_argument("unknown activation " + name);
}

Curve curve_of(Act act, const CurveNumbers& numbers) {
  require(act != Act::xielu || numbers.has_value(), "xIELU has four numbers");
  if (!numbers.has_value()) return {};
  const auto [positive, negative, beta, eps] = *numbers;
  return {positive, negative, beta, eps};
}

ExpertsPlan::ExpertsPlan(std::shared_ptr<MatrixHandle> router, std::shared_ptr<MatrixHandle> gate,
                         std::shared_ptr<MatrixHandle> up, std::shared_ptr<MatrixHandle> down, int active,
                         bool normalized, const std::string& activation, RouterRule rule,
                         const std::optional<mx::array>& correction, const std::optional<mx::array>& router_norm,
                         const std::optional<mx::array>& expert_scale, bool residual)
    : router_(std::move(router)), gate_(std::move(gate)), up_(std::move(up)), down_(std::move(down)) {
  // `call_` gets copies of the matrices' views, with pointers to the data.
  for (const auto& matrix : {router_, gate_, up_, down_}) require(matrix == nullptr || matrix->filled(), "a weight is not read yet");
  const Matrix &r = router_->view(), &u = up_->view(), &d = down_->view();
  require(active > 0 && active <= r.n, "a token is given to at least one expert, and to no more than there are");
  require(u.n == r.n * d.k && d.n == r.n * r.k && u.k == r.k, "the experts do not fit");
  call_.router = r;
  if (gate_ != nullptr) call_.gate = gate_->view();
  call_.up = u;
  call_.down = d;
  call_.active = active;
  call_.normalized = normalized;
  require(rule.groups.first > 0 && rule.groups.second > 0 && r.n % rule.groups.first == 0, "the groups of experts are equal");
  require(rule.best == 1 || rule.best == 2, "groups are ranked by their best expert or two");
  call_.rule = rule;
  vectors_.reserve(3);
  call_.rule.correction = keep(correction, r.n, "every expert has a correction");
  call_.rule.expert_scale = keep(expert_scale, r.n, "every expert has a scale");
  call_.router_norm = keep(router_norm, r.k, "a router's norm is as wide as the layer");
  call_.residual = residual;
  call_.act = activation_of(activation);
  require(call_.act != Act::xielu, "experts have no curve");
  require(gates(call_.act) == (gate_ != nullptr), "a gated unit has a gate");
  require(gate_ == nullptr || (call_.gate.n == u.n && call_.gate.k == u.k), "gate and up do not fit");
}

const float* ExpertsPlan::keep(const std::optional<mx::array>& vector, int64_t size, const char* problem) {
  if (!vector.has_value()) return nullptr;
  require(vector->shape() == mx::Shape{static_cast<int>(size)}, problem);
  vectors_.push_back(settled(mx::astype(*vector, mx::float32, cpu_stream())));
  return vectors_.back().data<float>();
}

mx::array experts(const mx::array& x, const mx::array& norm, float eps, const std::shared_ptr<ExpertsPlan>& plan) {
  const auto width = static_cast<int>(plan->call().router.k);
  require(x.dtype() == mx::float32 && x.ndim() > 0 && x.shape(-1) == width, "activations must be float32, (..., E)");
  require(norm.shape() == mx::Shape{width}, "a norm must be as wide as the layer");
  auto node = std::make_shared<Experts>(cpu_stream(), plan, eps);
  return mx::array(x.shape(), mx::float32, std::move(node), {x, mx::astype(norm, mx::float32, cpu_stream())});
}

mx::array expert_linear(const mx::array& x, const mx::array& indices, const std::shared_ptr<MatrixHandle>& w, int experts) {
  const Matrix& view = w->view();
  require(experts > 0 && view.n % experts == 0, "the stack does not have so many matrices");
  require(x.dtype() == mx::float32 && x.ndim() == 2 && x.shape(1) == view.k, "rows must be float32, (M, K)");
  require(x.shape(0) == 0 ? indices.size() == 0 : indices.size() % static_cast<size_t>(x.shape(0)) == 0,
          "every row needs as many experts");
  mx::Shape shape = indices.shape();
  shape.push_back(static_cast<int>(view.n / experts));
  auto node = std::make_shared<ExpertLinear>(cpu_stream(), w, experts);
  return mx::array(std::move(shape), mx::float32, std::move(node), {x, mx::astype(indices, mx::int32, cpu_stream())});
}

}  // namespace headrace
