// See layer_primitive.h.
#include "layer_primitive.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include "../core/linear.h"
#include "../core/recurrent.h"
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

// One layer's memory in a pass: K/V blocks, or the mixer's sequences.
struct LayerMemory {
  const LayerBlocks* blocks = nullptr;
  const std::vector<MixerRows>* sequences = nullptr;
  float* inputs = nullptr;  // of the first `kept` rows of the mixer, to keep
  int64_t kept = 0;
};

// The mixer of a layer: the projection `into` it, then y (rows, Hv * Dv).
void run_recurrent(const LayerPlan& plan, const LayerMemory& memory, const LinearCall& into, float* y) {
  run_linear(Pool::shared(), best_kernels(), into);
  const int64_t width = plan.mixer->shape().projected();
  if (memory.kept > 0) std::memcpy(memory.inputs, into.out, static_cast<size_t>(memory.kept * width) * sizeof(float));
  MixerCall call;
  call.shape = plan.mixer->shape();
  call.x = into.out;
  call.tokens = into.rows;
  call.sequences = memory.sequences->data();
  call.count = static_cast<int64_t>(memory.sequences->size());
  call.out = y;
  run_mixer(Pool::shared(), best_kernels(), call);
}

// The layer's attention, gated if it is, or its mixer: x (rows, E) to heads (rows, H * D), by way of `wide`.
void run_mixing(const LayerPlan& plan, const LayerMemory& memory, LinearCall qkv, const LinearCall& output, float* heads) {
  Pool& pool = Pool::shared();
  const Kernels& kernels = best_kernels();
  qkv.norm = plan.input_norm;
  qkv.eps = plan.eps;
  LinearCall gate;
  if (plan.gate != nullptr) {
    gate = projection(qkv.x, qkv.rows, *plan.gate, scratch(Slot::mixed, qkv.rows * plan.gate->view().n));
    gate.norm = plan.input_norm;
    gate.eps = plan.eps;
    gate.next = &output;
  }
  qkv.next = plan.gate != nullptr ? &gate : &output;
  if (plan.attention == nullptr) {
    run_recurrent(plan, memory, qkv, heads);
    return;
  }
  run_linear(pool, kernels, qkv);
  if (plan.gate != nullptr) run_linear(pool, kernels, gate);
  AttendCall attend = plan.attention->call();
  memory.blocks->describe(attend);
  attend.qkv = qkv.out;
  attend.out = heads;
  run_attend(pool, kernels, attend);
  if (plan.gate != nullptr) run_gated(pool, kernels, gate.out, heads, qkv.rows * plan.gate->view().n, Act::sigmoid, heads);
}

// Multiplies each row of the feed-forward, (rows, F), by its gate: down(g * x) is g * down(x).
void run_down_gate(const LayerPlan& plan, int64_t rows, const float* x, float* inner) {
  Pool& pool = Pool::shared();
  const Kernels& kernels = best_kernels();
  float* gates = scratch(Slot::logits, rows);
  LinearCall call = projection(x, rows, *plan.down_gate, gates);
  call.norm = plan.mlp_norm;
  call.eps = plan.eps;
  run_linear(pool, kernels, call);
  const int64_t width = plan.down->view().k;
  pool.run(rows, [&](Tasks& tasks) {
    while (tasks.next()) {
      kernels.rescale(inner + tasks.index() * width, 1.0f / (1.0f + std::exp(-gates[tasks.index()])), width);
    }
  }, rows > 1);
}

// The calls of a layer, in order; `out` may be `x`. `after` is the next layer, or nullptr.
void run_layer(const LayerPlan& plan, const LayerPlan* after, const LayerMemory& memory, int64_t rows, const float* x, float* out) {
  Pool& pool = Pool::shared();
  const Kernels& kernels = best_kernels();
  const int64_t inner = plan.down == nullptr ? 0 : plan.down->view().k;
  float* wide = scratch(Slot::wide, rows * std::max(plan.qkv->view().n, inner));
  float* heads = scratch(Slot::heads, rows * plan.output->view().k);

  LinearCall output = projection(heads, rows, *plan.output, out), beside;
  LinearCall following;
  if (after != nullptr) following.w = after->qkv->view();
  const LinearCall* next = after != nullptr ? &following : nullptr;
  output.residual = x;
  run_mixing(plan, memory, projection(x, rows, *plan.qkv, wide), output, heads);
  if (plan.mixer_in != nullptr) {  // of the same input, which `output` overwrites if out is x
    LinearCall into = projection(x, rows, *plan.mixer_in, scratch(Slot::beside, rows * plan.mixer_in->view().n));
    float* y = scratch(Slot::beside_heads, rows * plan.mixer_out->view().k);
    into.norm = plan.input_norm;
    into.eps = plan.eps;
    into.next = &output;
    run_recurrent(plan, memory, into, y);
    beside = projection(y, rows, *plan.mixer_out, out);
    beside.residual = out;
  }
  LinearCall& last = plan.mixer_in != nullptr ? beside : output;  // before the feed-forward
  const auto run_outputs = [&] {
    if (plan.mixer_in != nullptr) {
      output.next = &beside;
      run_linear(pool, kernels, output);
    }
    run_linear(pool, kernels, last);
  };
  if (plan.down == nullptr) {
    if (plan.experts == nullptr) last.next = next;
    run_outputs();
    if (plan.experts != nullptr) run_experts_half(plan, next, rows, out);
    return;
  }

  LinearCall gate_up = projection(out, rows, *plan.gate_up, wide);
  LinearCall down = projection(wide, rows, *plan.down, out);
  gate_up.norm = plan.mlp_norm;
  gate_up.eps = plan.eps;
  gate_up.act = plan.act;
  down.residual = out;
  last.next = &gate_up;
  gate_up.next = &down;
  down.next = next;
  run_outputs();
  run_linear(pool, kernels, gate_up);
  if (plan.down_gate != nullptr) run_down_gate(plan, rows, out, wide);
  if (plan.experts != nullptr) run_experts_half(plan, nullptr, rows, out);  // beside the shared one, of the same input
  run_linear(pool, kernels, down);
}

struct Layer {
  std::shared_ptr<LayerPlan> plan;
  LayerBlocks blocks;
};

// Input and output: x. Layers with a mixer have further inputs, the states of all sequences, and outputs: their new states, and the
// mixer's inputs of the first `kept` rows, if any. counts: rows of each sequence.
class Layers : public Node {
 public:
  Layers(mx::Stream stream, std::vector<Layer> layers, std::vector<int> counts, int kept)
      : Node(stream),
        layers_(std::make_shared<const std::vector<Layer>>(std::move(layers))),
        counts_(std::move(counts)),
        kept_(kept) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    std::vector<float*> to;
    for (mx::array& out : outputs) {
      out.set_data(allocated(out.nbytes()));
      to.push_back(out.data<float>());
    }
    const int64_t rows = static_cast<int64_t>(outputs[0].size()) / outputs[0].shape(-1);
    std::vector<Rows> from(inputs.begin(), inputs.end());
    auto task = [layers = layers_, counts = counts_, kept = kept_, rows, from = std::move(from), to = std::move(to)] {
      std::vector<std::vector<char>> copies(from.size());
      const float* x = from[0].read<float>(copies[0]);
      size_t state = 1, output = 1;
      for (size_t i = 0; i < layers->size(); ++i) {
        const Layer& layer = (*layers)[i];
        const LayerPlan* after = i + 1 < layers->size() ? (*layers)[i + 1].plan.get() : nullptr;
        LayerMemory memory{.blocks = &layer.blocks, .kept = kept};
        std::vector<MixerRows> sequences;
        if (layer.plan->mixer != nullptr) {
          int64_t row = 0;
          for (const int count : counts) {
            const float* before = from[state].read<float>(copies[state]);
            ++state;
            sequences.push_back({row, count, before, to[output++]});
            row += count;
          }
          memory.sequences = &sequences;
          if (kept > 0) memory.inputs = to[output++];
        }
        run_layer(*layer.plan, after, memory, rows, x, to[0]);
        x = to[0];
      }
    };
    mx::cpu::get_command_encoder(stream()).dispatch(std::move(task));
  }

  const char* name() const override { return "HeadraceLayers"; }

 private:
  std::shared_ptr<const std::vector<Layer>> layers_;  // shared with the task, which outlives the node
  std::vector<int> counts_;
  int kept_;
};

mx::array norm_of(const mx::array& weight, int64_t width) {
  require(weight.shape() == mx::Shape{static_cast<int>(width)}, "a norm must be as wide as the layer");
  return settled(mx::astype(weight, mx::float32, cpu_stream()));
}

}  // namespace

LayerPlan::LayerPlan(std::shared_ptr<AttentionPlan> attention_, const mx::array& input,
                     std::shared_ptr<MatrixHandle> qkv_, std::shared_ptr<MatrixHandle> output_, const std::optional<mx::array>& mlp,
                     std::shared_ptr<MatrixHandle> gate_up_, std::shared_ptr<MatrixHandle> down_, float eps_,
                     const std::string& activation, std::shared_ptr<ExpertsPlan> experts_, std::shared_ptr<MixerPlan> mixer_,
                     std::shared_ptr<MatrixHandle> gate_, std::shared_ptr<MatrixHandle> down_gate_,
                     std::shared_ptr<MatrixHandle> mixer_in_, std::shared_ptr<MatrixHandle> mixer_out_)
    : attention(std::move(attention_)),
      qkv(std::move(qkv_)),
      output(std::move(output_)),
      gate_up(std::move(gate_up_)),
      down(std::move(down_)),
      experts(std::move(experts_)),
      mixer(std::move(mixer_)),
      gate(std::move(gate_)),
      down_gate(std::move(down_gate_)),
      mixer_in(std::move(mixer_in_)),
      mixer_out(std::move(mixer_out_)),
      eps(eps_),
      act(activation_of(activation)),
      norms_{norm_of(input, qkv->view().k), norm_of(mlp.value_or(input), qkv->view().k)} {
  const int64_t width = qkv->view().k;
  require((attention != nullptr) + (mixer != nullptr) == (mixer_in != nullptr ? 2 : 1), "a layer has attention or a mixer");
  int64_t inner = 0, projected = 0;
  if (mixer_in != nullptr) {
    const Matrix &into = mixer_in->view(), &from = mixer_out->view();
    require(into.n == mixer->shape().projected() && into.k == width, "the projections into the mixer do not fit");
    require(from.k == mixer->shape().inner() && from.n == width, "the mixer's output does not fit");
  }
  if (attention == nullptr) {
    inner = mixer->shape().inner();
    projected = mixer->shape().projected();
  } else {
    const AttendCall& heads = attention->call();
    inner = heads.heads * heads.dim;
    projected = inner + 2 * heads.kv_heads * heads.dim;
  }
  require(qkv->view().n == projected && output->view().k == inner && output->view().n == width, "the projections do not fit");
  require(gate == nullptr || (mixer == nullptr && gate->view().n == inner && gate->view().k == width), "the gate does not fit");
  require(down_gate == nullptr || (down != nullptr && down_gate->view().n == 1 && down_gate->view().k == width), "the gate does not fit");
  if (experts != nullptr) require(experts->call().router.k == width, "the experts do not fit");
  require((gate_up != nullptr) == (down != nullptr), "a feed-forward has two projections");
  require(mlp.has_value() || (down == nullptr && experts == nullptr), "a feed-forward has a norm");
  if (down != nullptr) {
    require(gate_up->view().k == width && gate_up->view().n == (gates(act) ? 2 : 1) * down->view().k, "gate and up do not fit");
    require(down->view().n == width, "down does not fit");
  }
  input_norm = norms_[0].data<float>();
  mlp_norm = norms_[1].data<float>();
}

namespace {

void check_rows(const mx::array& x, const std::vector<std::shared_ptr<LayerPlan>>& plans) {
  require(x.dtype() == mx::float32 && !plans.empty(), "activations must be float32");
  for (const auto& plan : plans) {
    require(plan != nullptr, "a layer has no plan");
    require(x.ndim() == 3 && x.shape(2) == plan->qkv->view().k, "x must be (B, T, E)");
  }
}

}  // namespace

mx::array layers(const mx::array& x, const std::vector<mx::array>& keys, const std::vector<mx::array>& values, int offset,
                 const std::vector<std::shared_ptr<LayerPlan>>& plans, const std::vector<int>& firsts, bool prefill) {
  check_rows(x, plans);
  require(keys.size() == plans.size() && values.size() == plans.size() && (firsts.empty() || firsts.size() == plans.size()),
          "keys, values and the first position of every layer are needed");
  std::vector<Layer> stack;
  for (size_t i = 0; i < plans.size(); ++i) {
    require(plans[i]->mixer == nullptr, "recurrent state is kept beside blocks only");
    stack.push_back({plans[i], contiguous_blocks(keys[i], values[i], plans[i]->attention->call(), x.shape(0), x.shape(1), offset,
                                                 firsts.empty() ? 0 : firsts[i], prefill ? Phase::prefill : Phase::decode)});
  }
  auto node = std::make_shared<Layers>(cpu_stream(), std::move(stack), std::vector<int>(), 0);
  return mx::array(x.shape(), mx::float32, std::move(node), {x});
}

std::vector<mx::array> layers_pass(const mx::array& x, const std::shared_ptr<Pass>& pass,
                                   const std::vector<std::pair<int, int>>& places,
                                   const std::vector<std::shared_ptr<LayerPlan>>& plans,
                                   const std::vector<std::vector<mx::array>>& states, int kept) {
  check_rows(x, plans);
  require(places.size() == plans.size(), "the place of every layer is needed");
  require(x.shape(0) == 1 && x.shape(1) == pass->rows() && kept >= 0 && kept <= pass->rows(), "x must have the rows of the pass");
  std::vector<Layer> stack;
  std::vector<mx::array> inputs{x};
  std::vector<mx::Shape> shapes{x.shape()};
  size_t recurrent = 0;
  for (size_t i = 0; i < plans.size(); ++i) {
    stack.push_back({plans[i], {}});
    if (plans[i]->attention != nullptr) {
      stack.back().blocks = pass->layer(places[i].first, places[i].second, plans[i]->attention->call());
    }
    if (plans[i]->mixer == nullptr) continue;
    const MixerShape& shape = plans[i]->mixer->shape();
    const mx::Shape of_state{static_cast<int>(shape.state_floats())};
    require(recurrent < states.size() && states[recurrent].size() == pass->counts().size(), "every sequence has its states");
    for (const mx::array& state : states[recurrent++]) {
      require(state.dtype() == mx::float32 && state.shape() == of_state, "a state does not fit the mixer");
      inputs.push_back(state);
      shapes.push_back(of_state);
    }
    if (kept > 0) shapes.push_back({1, kept, static_cast<int>(shape.projected())});
  }
  const std::vector<mx::Dtype> types(shapes.size(), mx::float32);
  auto node = std::make_shared<Layers>(cpu_stream(), std::move(stack), pass->counts(), kept);
  return mx::array::make_arrays(std::move(shapes), types, std::move(node), inputs);
}

}  // namespace headrace
