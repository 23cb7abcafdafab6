// See layer_primitive.h.
#include "layer_primitive.h"

#include <algorithm>
#include <stdexcept>
#include <utility>
#include <vector>

#include "../core/linear.h"
#include "../core/scratch.h"
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

LinearCall projection(const float* x, int64_t rows, const MatrixHandle& w, float* out) {
  LinearCall call;
  call.x = x;
  call.rows = rows;
  call.w = w.view();
  call.out = out;
  return call;
}

// The rest of a layer with experts.
void run_experts_half(const LayerPlan& plan, const LinearCall* following, int64_t rows, float* out) {
  ExpertsCall call = plan.experts->call();
  call.x = call.out = out;
  call.rows = rows;
  call.norm = plan.mlp_norm;
  call.eps = plan.eps;
  call.next = following;
  run_experts(Pool::shared(), best_kernels(), call);
}

// The five calls, in order; `out` may be `x`. `attend` lacks only its rows; `after` is the next layer, or nullptr.
void run_layer(const LayerPlan& plan, const LayerPlan* after, AttendCall attend, const float* x, float* out) {
  Pool& pool = Pool::shared();
  const Kernels& kernels = best_kernels();
  const int64_t rows = attend.rows();
  const int64_t inner = plan.experts == nullptr ? plan.down->view().k : 0;
  float* wide = scratch(Slot::wide, rows * std::max(plan.qkv->view().n, inner));
  float* heads = scratch(Slot::heads, rows * plan.output->view().k);
  attend.qkv = wide;
  attend.out = heads;

  LinearCall qkv = projection(x, rows, *plan.qkv, wide);
  LinearCall output = projection(heads, rows, *plan.output, out);
  LinearCall following;
  if (after != nullptr) following.w = after->qkv->view();
  const LinearCall* next = after != nullptr ? &following : nullptr;
  qkv.norm = plan.input_norm;
  qkv.eps = plan.eps;
  output.residual = x;
  qkv.next = &output;
  run_linear(pool, kernels, qkv);
  run_attend(pool, kernels, attend);
  if (plan.experts != nullptr) {
    run_linear(pool, kernels, output);
    run_experts_half(plan, next, rows, out);
    return;
  }

  LinearCall gate_up = projection(out, rows, *plan.gate_up, wide);
  LinearCall down = projection(wide, rows, *plan.down, out);
  gate_up.norm = plan.mlp_norm;
  gate_up.eps = plan.eps;
  gate_up.act = plan.act;
  down.residual = out;
  output.next = &gate_up;
  gate_up.next = &down;
  down.next = next;
  run_linear(pool, kernels, output);
  run_linear(pool, kernels, gate_up);
  run_linear(pool, kernels, down);
}

struct Layer {
  std::shared_ptr<LayerPlan> plan;
  LayerBlocks blocks;
};

// Input and output: x.
class Layers : public Node {
 public:
  Layers(mx::Stream stream, std::vector<Layer> layers)
      : Node(stream), layers_(std::make_shared<const std::vector<Layer>>(std::move(layers))) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    outputs[0].set_data(allocated(outputs[0].nbytes()));
    auto task = [layers = layers_, x = Rows(inputs[0]), out = outputs[0].data<float>()] {
      std::vector<char> copy;
      const float* from = x.read<float>(copy);
      for (size_t i = 0; i < layers->size(); ++i) {
        const Layer& layer = (*layers)[i];
        const LayerPlan* after = i + 1 < layers->size() ? (*layers)[i + 1].plan.get() : nullptr;
        AttendCall call = layer.plan->attention->call();
        layer.blocks.describe(call);
        run_layer(*layer.plan, after, call, from, out);
        from = out;
      }
    };
    mx::cpu::get_command_encoder(stream()).dispatch(std::move(task));
  }

  const char* name() const override { return "HeadraceLayers"; }

 private:
  std::shared_ptr<const std::vector<Layer>> layers_;  // shared with the task, which outlives the node
};

mx::array norm_of(const mx::array& weight, int64_t width) {
  require(weight.shape() == mx::Shape{static_cast<int>(width)}, "a norm must be as wide as the layer");
  return settled(mx::astype(weight, mx::float32, cpu_stream()));
}

}  // namespace

LayerPlan::LayerPlan(std::shared_ptr<AttentionPlan> attention_, const mx::array& input,
                     std::shared_ptr<MatrixHandle> qkv_, std::shared_ptr<MatrixHandle> output_, const mx::array& mlp,
                     std::shared_ptr<MatrixHandle> gate_up_, std::shared_ptr<MatrixHandle> down_, float eps_,
                     const std::string& activation, std::shared_ptr<ExpertsPlan> experts_)
    : attention(std::move(attention_)),
      qkv(std::move(qkv_)),
      output(std::move(output_)),
      gate_up(std::move(gate_up_)),
      down(std::move(down_)),
      experts(std::move(experts_)),
      eps(eps_),
      act(activation_of(activation)),
      norms_{norm_of(input, qkv->view().k), norm_of(mlp, qkv->view().k)} {
  const int64_t width = qkv->view().k;
  const AttendCall& heads = attention->call();
  require(qkv->view().n == (heads.heads + 2 * heads.kv_heads) * heads.dim, "qkv does not fit the attention");
  require(output->view().k == heads.heads * heads.dim && output->view().n == width, "output does not fit");
  if (experts != nullptr) {
    require(gate_up == nullptr && down == nullptr && experts->call().router.k == width, "the experts do not fit");
  } else {
    require(gate_up != nullptr && down != nullptr, "a layer has a feed-forward");
    require(gate_up->view().k == width && gate_up->view().n == 2 * down->view().k, "gate and up do not fit");
    require(down->view().n == width, "down does not fit");
  }
  input_norm = norms_[0].data<float>();
  mlp_norm = norms_[1].data<float>();
}

namespace {

// `blocks_of(i)`: the blocks of the i-th layer.
template <class BlocksOf>
mx::array stacked(const mx::array& x, const std::vector<std::shared_ptr<LayerPlan>>& plans, BlocksOf&& blocks_of) {
  require(x.dtype() == mx::float32, "activations must be float32");
  std::vector<Layer> stack;
  stack.reserve(plans.size());
  for (size_t i = 0; i < plans.size(); ++i) {
    require(plans[i] != nullptr, "a layer has no plan");
    require(x.ndim() == 3 && x.shape(2) == plans[i]->qkv->view().k, "x must be (B, T, E)");
    stack.push_back({plans[i], blocks_of(i)});
  }
  return mx::array(x.shape(), mx::float32, std::make_shared<Layers>(cpu_stream(), std::move(stack)), {x});
}

}  // namespace

mx::array layers(const mx::array& x, const std::vector<mx::array>& keys, const std::vector<mx::array>& values, int offset,
                 const std::vector<std::shared_ptr<LayerPlan>>& plans, const std::vector<int>& firsts, bool prefill) {
  require(!plans.empty() && keys.size() == plans.size() && values.size() == plans.size() &&
              (firsts.empty() || firsts.size() == plans.size()),
          "keys, values and the first position of every layer are needed");
  return stacked(x, plans, [&](size_t i) {
    return contiguous_blocks(keys[i], values[i], plans[i]->attention->call(), x.shape(0), x.shape(1), offset,
                             firsts.empty() ? 0 : firsts[i], prefill ? Phase::prefill : Phase::decode);
  });
}

mx::array layers_pass(const mx::array& x, const std::shared_ptr<Pass>& pass, const std::vector<std::pair<int, int>>& places,
                      const std::vector<std::shared_ptr<LayerPlan>>& plans) {
  require(!plans.empty() && places.size() == plans.size(), "the place of every layer is needed");
  require(x.ndim() == 3 && x.shape(0) == 1 && x.shape(1) == pass->rows(), "x must have the rows of the pass");
  return stacked(x, plans, [&](size_t i) {
    return pass->layer(places[i].first, places[i].second, plans[i]->attention->call());
  });
}

}  // namespace headrace
