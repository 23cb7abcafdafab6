// See attend_primitive.h.
#include "attend_primitive.h"

#include <limits>
#include <stdexcept>
#include <utility>

#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"
#include "node.h"
#include "strided.h"
#include "weight_arena.h"

namespace headrace {
namespace {

// Input: qkv. Output: out.
class Attend : public Node {
 public:
  Attend(mx::Stream stream, std::shared_ptr<AttentionPlan> plan, LayerBlocks blocks)
      : Node(stream), plan_(std::move(plan)), blocks_(std::move(blocks)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    outputs[0].set_data(allocated(outputs[0].nbytes()));
    AttendCall call = plan_->call();
    call.out = outputs[0].data<float>();
    blocks_.describe(call);
    auto task = [call, plan = plan_, blocks = blocks_, qkv = Rows(inputs[0])]() mutable {
      std::vector<char> copy;
      call.qkv = qkv.read<float>(copy);
      run_attend(Pool::shared(), best_kernels(), call);
    };
    mx::cpu::get_command_encoder(stream()).dispatch(std::move(task));
  }

  const char* name() const override { return "HeadraceAttend"; }

 private:
  std::shared_ptr<AttentionPlan> plan_;
  LayerBlocks blocks_;
};

void require(bool fits, const char* what) {
  if (!fits) throw std::invalid_argument(what);
}

}  // namespace

std::shared_ptr<Rope> make_rope(const mx::array& periods, float amplitude) {
  require(periods.ndim() == 1, "rope periods have one dimension");
  const mx::array floats = settled(mx::astype(periods, mx::float32, cpu_stream()));
  return std::make_shared<Rope>(std::vector<float>(floats.data<float>(), floats.data<float>() + floats.size()),
                                amplitude);
}

AttentionPlan::AttentionPlan(int heads, int kv_heads, int dim, float scale, std::shared_ptr<Rope> rope,
                             const std::optional<mx::array>& q_norm, const std::optional<mx::array>& k_norm,
                             float norm_eps, std::optional<int> window, std::optional<float> softcap,
                             const std::optional<mx::array>& sinks)
    : rope_(std::move(rope)) {
  require(heads > 0 && kv_heads > 0 && heads % kv_heads == 0, "query heads must be shared evenly by kv heads");
  require(dim > 0 && dim % 16 == 0, "the head size must be a multiple of 16");
  const int64_t rows = int64_t{heads} + 2 * int64_t{kv_heads};  // of projections: queries, keys and values
  require(rows <= std::numeric_limits<int>::max() / dim, "attention is wider than an array can be");
  require(rope_ == nullptr || rope_->dims() <= dim, "rope turns more dimensions than a head has");
  vectors_.reserve(3);
  call_.heads = heads;
  call_.kv_heads = kv_heads;
  call_.dim = dim;
  call_.norm_eps = norm_eps;
  call_.rope = rope_.get();
  call_.rule = {scale, softcap.value_or(0.0f)};
  call_.window = window.value_or(0);
  call_.q_norm = keep(q_norm, dim);
  call_.k_norm = keep(k_norm, dim);
  call_.sinks = keep(sinks, heads);
}

const float* AttentionPlan::keep(const std::optional<mx::array>& vector, int64_t size) {
  if (!vector.has_value()) return nullptr;
  require(vector->shape() == mx::Shape{static_cast<int>(size)}, "head norms must be (D,), sinks (H,)");
  vectors_.push_back(settled(mx::astype(*vector, mx::float32, cpu_stream())));
  return vectors_.back().data<float>();
}

namespace {

mx::array attended(const mx::array& qkv, const std::shared_ptr<AttentionPlan>& plan, LayerBlocks blocks) {
  mx::Shape out{qkv.shape(0), qkv.shape(1), static_cast<int>(plan->call().heads * plan->call().dim)};
  return mx::array(std::move(out), mx::float32, std::make_shared<Attend>(cpu_stream(), plan, std::move(blocks)), {qkv});
}

void require_projections(const mx::array& qkv, const AttendCall& call) {
  require(qkv.dtype() == mx::float32, "activations must be float32");
  require(qkv.ndim() == 3 && qkv.shape(2) == (call.heads + 2 * call.kv_heads) * call.dim,
          "qkv must be (B, T, (H + 2 Hkv) * D)");
}

}  // namespace

mx::array attend(const mx::array& qkv, const mx::array& keys, const mx::array& values, int offset,
                 const std::shared_ptr<AttentionPlan>& plan, int first, bool prefill) {
  const AttendCall& call = plan->call();
  require_projections(qkv, call);
  const Phase phase = prefill ? Phase::prefill : Phase::decode;
  return attended(qkv, plan, contiguous_blocks(keys, values, call, qkv.shape(0), qkv.shape(1), offset, first, phase));
}

mx::array attend_pass(const mx::array& qkv, const std::shared_ptr<Pass>& pass, int group, int index,
                      const std::shared_ptr<AttentionPlan>& plan) {
  require_projections(qkv, plan->call());
  require(qkv.shape(0) == 1 && qkv.shape(1) == pass->rows(), "qkv must have the rows of the pass");
  return attended(qkv, plan, pass->layer(group, index, plan->call()));
}

}  // namespace headrace
