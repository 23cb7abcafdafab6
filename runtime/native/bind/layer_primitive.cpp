// The graph node of all decoder layers: the calls of a layer, and checks of its parameters (layer_primitive.h).
#include "layer_primitive.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "../core/gated.h"
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

// One layer's memory in a pass: K/V blocks, or the mixer's sequences. prompts, rounding: as in LinearCall.
struct LayerMemory {
  const LayerBlocks* blocks = nullptr;
  const std::vector<MixerRows>* sequences = nullptr;
  float* inputs = nullptr;  // of the first `kept` rows of the mixer, to keep
  int64_t kept = 0;
  const float* own_input = nullptr;  // of the layer, rows `input_stride` apart
  int64_t input_stride = 0;
  const uint8_t* prompts = nullptr;
  int rounding = 0;
  int64_t wanted = 0;  // first rows that the layer computes; the others only append and advance the state
  Peer* peer = nullptr;  // of the rank that has the other part of each layer, if any

  // Whether this rank adds the residual to its part.
  bool adds_residual() const { return peer == nullptr || peer->rank() == 0; }
};


// The experts of a layer, whose input is x; out may be x.
void run_layer_experts(const LayerPlan& plan, const LinearCall* following, int64_t rows, const float* x, float* out) {
  ExpertsCall call = plan.experts->call();
  const int64_t numbers = rows * call.router.k;
  const bool apart = !call.residual && out == x;
  call.x = x;
  call.out = apart ? scratch(Slot::other_branch, numbers) : out;
  call.rows = rows;
  call.norm = plan.before_experts != nullptr ? plan.before_experts : plan.mlp_norm;
  call.eps = plan.eps;
  call.next = following;
  run_experts(Pool::shared(), best_kernels(), call);
  if (apart) std::memcpy(out, call.out, static_cast<size_t>(numbers) * sizeof(float));
}

// Adds the other rank's part of x (rows, E), if the layers are divided between two.
void add_other_part(const LayerPlan& plan, const LayerMemory& memory, float* x) {
  if (memory.peer != nullptr) memory.peer->add(x, memory.wanted * plan.width());
}

// out = (residual + norm(x)) * scale.
void add_normed(const LayerPlan& plan, int64_t rows, const float* x, const float* norm, const float* residual, float scale,
                float* out) {
  run_norm_add(Pool::shared(), best_kernels(), {x, rows, plan.width(), norm, plan.eps, residual, scale, out});
}

// gates = gelu(gates) * the layer's own input, (rows, P).
void run_own_input(const LayerMemory& memory, int64_t rows, int64_t size, float* gates) {
  const Kernels& kernels = best_kernels();
  Pool::shared().run(
      rows,
      [&](Tasks& tasks) {
        while (tasks.next()) {
          float* gate = gates + tasks.index() * size;
          kernels.gated(gate, memory.own_input + tasks.index() * memory.input_stride, size, Act::gelu, gate);
        }
      },
      rows * size > kAloneNumbers);
}

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

// The calls of `plan.qkv`, whose results stand side by side in the rows of `first.out`. first: of the first matrix. next: the call after them.
std::vector<LinearCall> projections(const LayerPlan& plan, const LinearCall& first, const LinearCall* next) {
  std::vector<LinearCall> calls(plan.qkv.size(), first);
  const int64_t stride = plan.projected();
  int64_t at = 0;
  for (size_t i = 0; i < calls.size(); ++i) {
    calls[i].w = plan.qkv[i]->view();
    calls[i].out = first.out + at;
    calls[i].stride = stride;
    calls[i].next = i + 1 < calls.size() ? &calls[i + 1] : next;
    at += calls[i].w.n;
  }
  return calls;
}

// The layer's attention, gated if it is, or its mixer: x (rows, E) to heads (rows, H * D), by way of `wide`. qkv: of the first matrix.
void run_mixing(const LayerPlan& plan, const LayerMemory& memory, LinearCall qkv, const LinearCall& output, float* heads) {
  Pool& pool = Pool::shared();
  const Kernels& kernels = best_kernels();
  qkv.norm = plan.input_norm;
  qkv.eps = plan.eps;
  LinearCall gate;
  const bool gated = plan.gate != nullptr && memory.wanted > 0;
  if (gated) {
    gate = projection(qkv.x, memory.wanted, *plan.gate, scratch(Slot::mixed, memory.wanted * plan.gate->view().n));
    gate.norm = plan.input_norm;
    gate.eps = plan.eps;
    gate.next = &output;
    gate.prompts = qkv.prompts;
    gate.rounding = qkv.rounding;
  }
  qkv.next = gated ? &gate : &output;
  if (plan.attention == nullptr) {
    run_recurrent(plan, memory, qkv, heads);
    return;
  }
  for (const LinearCall& call : projections(plan, qkv, qkv.next)) run_linear(pool, kernels, call);
  if (gated) run_linear(pool, kernels, gate);
  AttendCall attend = plan.attention->call();
  memory.blocks->describe(attend);
  attend.qkv = qkv.out;
  attend.wanted = memory.wanted;
  attend.out = heads;
  run_attend(pool, kernels, attend);
  if (gated) run_gated(pool, kernels, gate.out, heads, memory.wanted * plan.gate->view().n, Act::sigmoid, heads);
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

// The feed-forward of x in place. `last`: the call behind it. branch: (rows, E).
void run_feed_forward(const LayerPlan& plan, const LayerMemory& memory, const LinearCall* last, const LinearCall& gate_up,
                      LinearCall down, float* branch, float* x) {
  Pool& pool = Pool::shared();
  const Kernels& kernels = best_kernels();
  const int64_t rows = memory.wanted;
  if (plan.down == nullptr) {
    if (plan.experts == nullptr) return;
    run_layer_experts(plan, last, rows, x, x);
    return add_other_part(plan, memory, x);
  }
  down.next = last;
  run_linear(pool, kernels, gate_up);
  if (plan.down_gate != nullptr) run_down_gate(plan, rows, x, gate_up.out);
  if (plan.mlp_post == nullptr) {
    if (plan.experts != nullptr) run_layer_experts(plan, nullptr, rows, x, x);  // beside the shared one, of the same input
    if (plan.experts != nullptr || memory.adds_residual()) down.residual = x;
    down.out = x;
    run_linear(pool, kernels, down);
    return add_other_part(plan, memory, x);
  }
  down.out = branch;
  run_linear(pool, kernels, down);
  add_other_part(plan, memory, branch);
  if (plan.experts != nullptr) {
    const int64_t width = plan.width();
    float* other = scratch(Slot::other_branch, rows * width);
    run_layer_experts(plan, nullptr, rows, x, other);
    add_other_part(plan, memory, other);
    run_rms_norm(pool, kernels, branch, rows, width, plan.after_dense, plan.eps, branch);
    add_normed(plan, rows, other, plan.after_experts, branch, 1.0f, branch);
  }
  add_normed(plan, rows, branch, plan.mlp_post, x, plan.own_gate == nullptr ? plan.scalar : 1.0f, x);
}

// The calls of a layer, in order; `out` may be `x`. `after` is the next layer, or nullptr. tokens: rows of x, of which `wanted` are
// computed. x (tokens, E), out (wanted, E).
void run_layer(const LayerPlan& plan, const LayerPlan* after, const LayerMemory& memory, int64_t tokens, const float* x, float* out) {
  Pool& pool = Pool::shared();
  const Kernels& kernels = best_kernels();
  const int64_t rows = memory.wanted, inner = plan.down == nullptr ? 0 : plan.down->view().k;
  float* wide = scratch(Slot::wide, std::max(tokens * plan.projected(), rows * inner));
  float* heads = scratch(Slot::heads, tokens * plan.output->view().k);
  float* branch = plan.has_branch() ? scratch(Slot::branch, rows * plan.width()) : nullptr;

  // Every call is described first, from the last to the first, since each names the one after it for prefetch.
  LinearCall following, gate_up, down, own_gate, own_projection;
  if (after != nullptr) following.w = after->qkv.front()->view();
  const LinearCall *next = after != nullptr ? &following : nullptr, *last = next;
  if (plan.own_gate != nullptr) {
    float* gates = scratch(Slot::own_input, rows * plan.own_gate->view().n);
    own_projection = projection(gates, rows, *plan.own_projection, branch);
    own_projection.next = next;
    own_gate = projection(out, rows, *plan.own_gate, gates);
    own_gate.next = &own_projection;
    last = &own_gate;
  }
  LinearCall output = projection(heads, rows, *plan.output, plan.attention_post == nullptr ? out : branch);
  if (plan.attention_post == nullptr && memory.adds_residual()) output.residual = x;
  if (plan.down != nullptr) {
    gate_up = projection(out, rows, *plan.gate_up, wide);
    gate_up.norm = plan.mlp_norm;
    gate_up.eps = plan.eps;
    gate_up.act = plan.act;
    gate_up.curve = plan.curve;
    down = projection(wide, rows, *plan.down, nullptr);
    gate_up.next = &down;
    output.next = &gate_up;
  } else if (plan.experts == nullptr) {
    output.next = last;
  }
  LinearCall qkv = projection(x, tokens, *plan.qkv.front(), wide);
  // A recurrence adds up what its inputs were moved by, so that those of mixers stay in 16 bits.
  if (plan.mixer == nullptr) output.prompts = qkv.prompts = memory.prompts;
  gate_up.prompts = down.prompts = memory.prompts;
  output.rounding = qkv.rounding = gate_up.rounding = down.rounding = memory.rounding;

  // Attention or the mixer, and its output projection; with `mixer_in` both, added up.
  run_mixing(plan, memory, qkv, output, heads);
  if (plan.mixer_in == nullptr && rows == 0) return;
  if (plan.mixer_in == nullptr) {
    run_linear(pool, kernels, output);
  } else {  // of the same input, which `output` overwrites if out is x
    LinearCall into = projection(x, tokens, *plan.mixer_in, scratch(Slot::beside, tokens * plan.mixer_in->view().n));
    float* y = scratch(Slot::beside_heads, tokens * plan.mixer_out->view().k);
    into.norm = plan.input_norm;
    into.eps = plan.eps;
    into.next = &output;
    run_recurrent(plan, memory, into, y);
    if (rows == 0) return;
    LinearCall beside = projection(y, rows, *plan.mixer_out, out);
    beside.residual = out;
    beside.next = output.next;
    output.next = &beside;
    run_linear(pool, kernels, output);
    run_linear(pool, kernels, beside);
  }
  add_other_part(plan, memory, plan.attention_post == nullptr ? out : branch);
  if (plan.attention_post != nullptr) add_normed(plan, rows, branch, plan.attention_post, x, 1.0f, out);

  // The feed-forward, then the layer's own input.
  run_feed_forward(plan, memory, last, gate_up, down, branch, out);
  if (plan.own_gate == nullptr) return;
  run_linear(pool, kernels, own_gate);
  run_own_input(memory, rows, own_gate.w.n, own_gate.out);
  run_linear(pool, kernels, own_projection);
  add_normed(plan, rows, branch, plan.after_input, out, plan.scalar, out);
}

struct Layer {
  std::shared_ptr<LayerPlan> plan;
  LayerBlocks blocks;
};

// Numbers of all layers' own inputs of a token.
int64_t inputs_of(const std::vector<Layer>& layers) {
  int64_t sum = 0;
  for (const Layer& layer : layers) sum += layer.plan->own_gate == nullptr ? 0 : layer.plan->own_gate->view().n;
  return sum;
}

// Input and output: x; the input may have the layers' own inputs behind its E numbers, and the output has its first rows. Layers with a
// mixer have further inputs, the states of all sequences, and outputs: their new states, and the mixer's inputs of the first `kept` rows,
// if any. counts: rows of each sequence. prompts: see LinearCall, or empty.
class Layers : public Node {
 public:
  Layers(mx::Stream stream, std::vector<Layer> layers, std::vector<int> counts, int kept, std::vector<uint8_t> prompts, int rounding,
         std::shared_ptr<Peer> peer)
      : Node(stream),
        layers_(std::make_shared<const std::vector<Layer>>(std::move(layers))),
        counts_(std::move(counts)),
        kept_(kept),
        prompts_(std::move(prompts)),
        rounding_(rounding),
        peer_(std::move(peer)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    std::vector<float*> to;
    const auto width = static_cast<int64_t>(outputs[0].shape(-1)), rows = static_cast<int64_t>(inputs[0].size()) / inputs[0].shape(-1);
    const int64_t wanted = static_cast<int64_t>(outputs[0].size()) / width;
    for (mx::array& out : outputs) {  // x has room for all rows between layers
      out.set_data(allocated(to.empty() ? static_cast<size_t>(rows * width) * sizeof(float) : out.nbytes()));
      to.push_back(out.data<float>());
    }
    std::vector<Rows> from(inputs.begin(), inputs.end());
    auto task = [layers = layers_, counts = counts_, kept = kept_, prompts = prompts_, rounding = rounding_, peer = peer_, rows, width, wanted, from = std::move(from), to = std::move(to)] {
      std::vector<std::vector<char>> copies(from.size());
      const float* x = from[0].read<float>(copies[0]);
      const int64_t stride = width + inputs_of(*layers);
      const float* own_input = x + width;
      if (stride > width) {
        for (int64_t m = 0; m < rows; ++m) std::memcpy(to[0] + m * width, x + m * stride, static_cast<size_t>(width) * sizeof(float));
        x = to[0];
      }
      size_t state = 1, output = 1;
      for (size_t i = 0; i < layers->size(); ++i) {
        const Layer& layer = (*layers)[i];
        const LayerPlan* after = i + 1 < layers->size() ? (*layers)[i + 1].plan.get() : nullptr;
        LayerMemory memory{.blocks = &layer.blocks, .kept = kept, .own_input = own_input, .input_stride = stride,
                           .prompts = prompts.empty() ? nullptr : prompts.data(), .rounding = rounding, .wanted = after == nullptr ? wanted : rows,
                           .peer = peer.get()};
        if (layer.plan->own_gate != nullptr) own_input += layer.plan->own_gate->view().n;
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
  std::vector<uint8_t> prompts_;
  int rounding_;
  std::shared_ptr<Peer> peer_;
};

}  // namespace

LayerPlan::LayerPlan(std::shared_ptr<AttentionPlan> attention_, Matrices qkv_, std::shared_ptr<MatrixHandle> output_,
                     std::shared_ptr<MatrixHandle> gate_up_, std::shared_ptr<MatrixHandle> down_, float eps_,
                     const std::string& activation, std::shared_ptr<ExpertsPlan> experts_, std::shared_ptr<MixerPlan> mixer_,
                     Gates gates_, const LayerNorms& norms, const std::optional<OwnInput>& own_input,
                     const std::optional<Gates>& mixer_ends, const CurveNumbers& curve_)
    : attention(std::move(attention_)),
      qkv(std::move(qkv_)),
      output(std::move(output_)),
      gate_up(std::move(gate_up_)),
      down(std::move(down_)),
      experts(std::move(experts_)),
      mixer(std::move(mixer_)),
      gate(std::move(gates_.first)),
      down_gate(std::move(gates_.second)),
      eps(eps_),
      act(activation_of(activation)),
      curve(curve_of(act, curve_)) {
  require(!qkv.empty() && (attention != nullptr || qkv.size() == 1), "a layer has projections of its input, one into a mixer");
  const int64_t width = this->width();
  require(std::all_of(qkv.begin(), qkv.end(), [&](const auto& part) { return part->view().k == width; }), "projections have one input");
  if (mixer_ends.has_value()) std::tie(mixer_in, mixer_out) = *mixer_ends;
  require((attention != nullptr) + (mixer != nullptr) == (mixer_in != nullptr ? 2 : 1), "a layer has attention or a mixer");
  int64_t inner = 0, mixed = 0;
  if (mixer_in != nullptr) {
    require(mixer_out != nullptr && !norms.attention_post.has_value(), "a mixer next to attention has two projections");
    const Matrix &into = mixer_in->view(), &from = mixer_out->view();
    require(into.n == mixer->shape().projected() && into.k == width, "the projections into the mixer do not fit");
    require(from.k == mixer->shape().inner() && from.n == width, "the mixer's output does not fit");
  }
  if (attention == nullptr) {
    inner = mixer->shape().inner();
    mixed = mixer->shape().projected();
  } else {
    const AttendCall& heads = attention->call();
    inner = heads.heads * heads.dim;
    mixed = heads.projected();
  }
  require(projected() == mixed && output->view().k == inner && output->view().n == width, "the projections do not fit");
  require(gate == nullptr || (mixer == nullptr && gate->view().n == inner && gate->view().k == width), "the gate does not fit");
  require(down_gate == nullptr || (down != nullptr && down_gate->view().n == 1 && down_gate->view().k == width), "the gate does not fit");
  if (experts != nullptr) require(experts->call().router.k == width, "the experts do not fit");
  require((gate_up != nullptr) == (down != nullptr), "a feed-forward has two projections");
  if (down != nullptr) {
    require(gate_up->view().k == width && gate_up->view().n == (gates(act) ? 2 : 1) * down->view().k, "gate and up do not fit");
    require(down->view().n == width, "down does not fit");
  }
  input_norm = keep(norms.input);
  attention_post = keep(norms.attention_post);
  mlp_norm = keep(norms.mlp);
  mlp_post = keep(norms.mlp_post);
  after_dense = keep(norms.after_dense);
  before_experts = keep(norms.before_experts);
  after_experts = keep(norms.after_experts);
  if (norms.scalar.has_value()) {
    require(norms.scalar->size() == 1 && mlp_post != nullptr, "a layer's factor is one number, after a norm");
    scalar = settled(mx::astype(*norms.scalar, mx::float32, cpu_stream())).data<float>()[0];
  }
  if (own_input.has_value()) {
    mx::array norm = mx::array(0.0f);
    std::tie(own_gate, own_projection, norm) = *own_input;
    after_input = keep(norm);
    require(own_gate->view().k == width && own_projection->view().n == width && own_projection->view().k == own_gate->view().n,
            "a layer's own input does not fit");
  }
  if (experts == nullptr) return;
  const bool branches = after_dense != nullptr && before_experts != nullptr && after_experts != nullptr;
  require(branches ? mlp_post != nullptr && down != nullptr : mlp_post == nullptr, "experts after a norm are a separate branch");
  require(!branches || !experts->call().residual, "experts of a branch are added later");
}

int64_t LayerPlan::projected() const {
  int64_t sum = 0;
  for (const auto& part : qkv) sum += part->view().n;
  return sum;
}

const float* LayerPlan::keep(const std::optional<mx::array>& norm) {
  if (!norm.has_value()) return nullptr;
  require(norm->shape() == mx::Shape{static_cast<int>(width())}, "a norm must be as wide as the layer");
  kept_.push_back(settled(mx::astype(*norm, mx::float32, cpu_stream())));
  return kept_.back().data<float>();
}

namespace {

// Checks x (B, T, E and all layers' own inputs), and returns the shape of the result, with `wanted` rows if that is not negative.
mx::Shape check_rows(const mx::array& x, const std::vector<std::shared_ptr<LayerPlan>>& plans, int wanted,
                     const std::shared_ptr<Peer>& peer) {
  require(x.dtype() == mx::float32 && !plans.empty(), "activations must be float32");
  int64_t inputs = 0;
  for (const auto& plan : plans) {
    require(plan != nullptr, "a layer has no plan");
    require(plan->width() == plans[0]->width(), "layers are equally wide");
    if (plan->own_gate != nullptr) inputs += plan->own_gate->view().n;
    const bool adds = plan->after_dense == nullptr && (peer == nullptr || peer->rank() == 0);
    require(plan->experts == nullptr || plan->experts->call().residual == adds, "experts add x on one rank, unless they are a branch");
  }
  const int64_t width = plans[0]->width();
  require(x.ndim() == 3 && x.shape(2) == width + inputs, "x must be (B, T, E), followed by the layers' own inputs");
  require(wanted <= x.shape(1) && (wanted < 0 || x.shape(0) == 1), "x must be one sequence with all wanted rows");
  return {x.shape(0), wanted < 0 ? x.shape(1) : wanted, static_cast<int>(width)};
}

// The rounding of a prompt's rows: halves instead of 16 bits where tiles take them.
int rounding_of_prompts(int wish) {
  require(wish == 16 || wish == 8, "activations are rounded to 16 or 8 bits");
  return wish == 16 && best_kernels().multiply_tiles != nullptr ? kHalves : wish;
}

}  // namespace

mx::array layers(const mx::array& x, const std::vector<mx::array>& keys, const std::vector<mx::array>& values, int offset,
                 const std::vector<std::shared_ptr<LayerPlan>>& plans, const std::vector<int>& firsts, bool prefill, int rounding,
                 int wanted, const std::shared_ptr<Peer>& peer) {
  mx::Shape shape = check_rows(x, plans, wanted, peer);
  require(keys.size() == plans.size() && values.size() == plans.size() && (firsts.empty() || firsts.size() == plans.size()),
          "keys, values and the first position of every layer are needed");
  std::vector<Layer> stack;
  for (size_t i = 0; i < plans.size(); ++i) {
    require(plans[i]->mixer == nullptr, "recurrent state needs blocks");
    stack.push_back({plans[i], contiguous_blocks(keys[i], values[i], plans[i]->attention->call(), x.shape(0), x.shape(1), offset,
                                                 firsts.empty() ? 0 : firsts[i], prefill ? Phase::prefill : Phase::decode)});
  }
  rounding = rounding_of_prompts(rounding);
  const auto rows = static_cast<size_t>(rounding != 16 && prefill ? int64_t{x.shape(0)} * x.shape(1) : 0);
  auto node = std::make_shared<Layers>(cpu_stream(), std::move(stack), std::vector<int>(), 0, std::vector<uint8_t>(rows, 1), rounding, peer);
  return mx::array(std::move(shape), mx::float32, std::move(node), {x});
}

std::vector<mx::array> layers_pass(const mx::array& x, const std::shared_ptr<Pass>& pass,
                                   const std::vector<std::pair<int, int>>& places,
                                   const std::vector<std::shared_ptr<LayerPlan>>& plans,
                                   const std::vector<std::vector<mx::array>>& states, int kept, int rounding, int wanted,
                                   const std::shared_ptr<Peer>& peer) {
  mx::Shape shape = check_rows(x, plans, wanted, peer);
  require(places.size() == plans.size(), "the place of every layer is needed");
  require(x.shape(0) == 1 && x.shape(1) == pass->rows() && kept >= 0 && kept <= pass->rows(), "x must have the rows of the pass");
  std::vector<Layer> stack;
  std::vector<mx::array> inputs{x};
  std::vector<mx::Shape> shapes{std::move(shape)};
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
  rounding = rounding_of_prompts(rounding);
  auto node = std::make_shared<Layers>(cpu_stream(), std::move(stack), pass->counts(), kept,
                                       rounding != 16 ? pass->of_prompts() : std::vector<uint8_t>(), rounding, peer);
  return mx::array::make_arrays(std::move(shapes), types, std::move(node), inputs);
}

}  // namespace headrace
