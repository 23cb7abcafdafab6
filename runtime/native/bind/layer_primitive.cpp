// See layer_primitive.h.
#include "layer_primitive.h"

#include <algorithm>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "../core/linear.h"
#include "../core/scratch.h"
#include "cache_buffers.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "node.h"
#include "strided.h"

namespace headrace {
namespace {

// Layers in a node. Every output of a node holds every input and every other output, so that long stretches cost more in
// reference counts than they save.
constexpr size_t kStretch = 8;

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

// The five calls, in order; `out` may be `x`. `attend` has everything but its rows.
void run_layer(const LayerPlan& plan, AttendCall attend, const float* x, float* out) {
  Pool& pool = Pool::shared();
  const Kernels& kernels = best_kernels();
  const int64_t rows = attend.batch * attend.length;
  float* wide = scratch(Slot::wide, rows * std::max(plan.qkv->view().n, plan.down->view().k));
  float* heads = scratch(Slot::heads, rows * plan.output->view().k);

  LinearCall qkv = projection(x, rows, *plan.qkv, wide);
  qkv.norm = plan.input_norm;
  qkv.eps = plan.eps;
  run_linear(pool, kernels, qkv);

  attend.qkv = wide;
  attend.out = heads;
  run_attend(pool, kernels, attend);

  LinearCall output = projection(heads, rows, *plan.output, out);
  output.residual = x;
  run_linear(pool, kernels, output);

  LinearCall gate_up = projection(out, rows, *plan.gate_up, wide);
  gate_up.norm = plan.mlp_norm;
  gate_up.eps = plan.eps;
  gate_up.act = plan.act;
  run_linear(pool, kernels, gate_up);

  LinearCall down = projection(wide, rows, *plan.down, out);
  down.residual = out;
  run_linear(pool, kernels, down);
}

// A stretch of n layers. Inputs: x, n keys, n values. Outputs: the same.
class Layers : public Node {
 public:
  Layers(mx::Stream stream, std::span<const std::shared_ptr<LayerPlan>> plans, int64_t offset)
      : Node(stream), plans_(plans.begin(), plans.end()), offset_(offset) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    outputs[0].set_data(mx::allocator::malloc(outputs[0].nbytes()));
    const size_t count = plans_.size();
    std::vector<Work> work;
    for (size_t i = 0; i < count; ++i) {
      const size_t keys = 1 + i, values = 1 + count + i;
      CacheBuffers cache(inputs[keys], inputs[values], outputs[keys], outputs[values], outputs.size());
      AttendCall call = plans_[i]->attention->call();
      call.batch = inputs[0].shape(0);
      call.length = inputs[0].shape(1);
      call.offset = offset_;
      cache.describe(call);
      work.push_back({plans_[i], call, std::move(cache)});
    }
    auto task = [work = std::move(work), x = Rows(inputs[0]), out = outputs[0].data<float>()] {
      std::vector<char> copy;
      const float* from = x.read<float>(copy);
      for (const Work& layer : work) {
        layer.cache.fill();
        run_layer(*layer.plan, layer.attend, from, out);
        from = out;
      }
    };
    mx::cpu::get_command_encoder(stream()).dispatch(std::move(task));
  }

  const char* name() const override { return "HeadraceLayers"; }

 private:
  struct Work {
    std::shared_ptr<LayerPlan> plan;
    AttendCall attend;
    CacheBuffers cache;
  };
  std::vector<std::shared_ptr<LayerPlan>> plans_;
  int64_t offset_;
};

mx::array norm_of(const mx::array& weight, int64_t width) {
  require(weight.shape() == mx::Shape{static_cast<int>(width)}, "a norm must be as wide as the layer");
  return settled(mx::astype(weight, mx::float32, cpu_stream()));
}

}  // namespace

LayerPlan::LayerPlan(std::shared_ptr<AttentionPlan> attention_, const mx::array& input,
                     std::shared_ptr<MatrixHandle> qkv_, std::shared_ptr<MatrixHandle> output_, const mx::array& mlp,
                     std::shared_ptr<MatrixHandle> gate_up_, std::shared_ptr<MatrixHandle> down_, float eps_,
                     const std::string& activation)
    : attention(std::move(attention_)),
      qkv(std::move(qkv_)),
      output(std::move(output_)),
      gate_up(std::move(gate_up_)),
      down(std::move(down_)),
      eps(eps_),
      act(activation == "silu" ? Act::silu : Act::gelu),
      norms_{norm_of(input, qkv->view().k), norm_of(mlp, qkv->view().k)} {
  const int64_t width = qkv->view().k;
  const AttendCall& heads = attention->call();
  require(activation == "silu" || activation == "gelu", "unknown activation");
  require(qkv->view().n == (heads.heads + 2 * heads.kv_heads) * heads.dim, "qkv does not fit the attention");
  require(output->view().k == heads.heads * heads.dim && output->view().n == width, "output does not fit");
  require(gate_up->view().k == width && gate_up->view().n == 2 * down->view().k, "gate and up do not fit");
  require(down->view().n == width, "down does not fit");
  input_norm = norms_[0].data<float>();
  mlp_norm = norms_[1].data<float>();
}

std::tuple<mx::array, std::vector<mx::array>, std::vector<mx::array>> layers(
    mx::array x, std::vector<mx::array> keys, std::vector<mx::array> values, int offset,
    const std::vector<std::shared_ptr<LayerPlan>>& plans) {
  require(x.dtype() == mx::float32, "activations must be float32");
  require(keys.size() == plans.size() && values.size() == plans.size(), "keys and values of every layer are needed");
  for (size_t i = 0; i < plans.size(); ++i) {
    require(x.ndim() == 3 && x.shape(2) == plans[i]->qkv->view().k, "x must be (B, T, E)");
    require_cache_fits(plans[i]->attention->call(), keys[i], values[i], x.shape(0), x.shape(1), offset);
  }
  for (size_t begin = 0; begin < plans.size(); begin += kStretch) {
    const size_t count = std::min(kStretch, plans.size() - begin);
    std::vector<mx::array> inputs{x};
    for (auto* buffers : {&keys, &values}) {
      for (size_t i = begin; i < begin + count; ++i) inputs.push_back(std::move((*buffers)[i]));
    }
    std::vector<mx::Shape> shapes;
    std::vector<mx::Dtype> dtypes;
    for (const mx::array& in : inputs) {
      shapes.push_back(in.shape());
      dtypes.push_back(in.dtype());
    }
    auto node = std::make_shared<Layers>(cpu_stream(), std::span(plans).subspan(begin, count), offset);
    auto outputs = mx::array::make_arrays(std::move(shapes), dtypes, node, std::move(inputs));
    x = outputs[0];
    for (size_t i = 0; i < count; ++i) {
      keys[begin + i] = outputs[1 + i];
      values[begin + i] = outputs[1 + count + i];
    }
  }
  return {std::move(x), std::move(keys), std::move(values)};
}

}  // namespace headrace
