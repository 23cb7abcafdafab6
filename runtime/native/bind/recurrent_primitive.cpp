// See recurrent_primitive.h.
#include "recurrent_primitive.h"

#include <memory>
#include <stdexcept>
#include <vector>

#include "../core/recurrent.h"
#include "experts_primitive.h"
#include "mlx/backend/cpu/encoder.h"
#include "node.h"
#include "strided.h"
#include "weight_arena.h"

namespace headrace {
namespace {

void require(bool fits, const char* what) {
  if (!fits) throw std::invalid_argument(what);
}

void require_floats(const mx::array& a, const mx::Shape& shape, const char* what) {
  require(a.dtype() == mx::float32 && a.shape() == shape, what);
}

// Inputs: q, k, v, decay, state, and beta where present. Outputs: y, state.
class Recurrence : public Node {
 public:
  using Node::Node;

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    for (mx::array& out : outputs) out.set_data(allocated(out.nbytes()));
    RecurrenceCall call;
    const mx::Shape &q = inputs[0].shape(), &v = inputs[2].shape();
    call.batch = q[0];
    call.tokens = q[1];
    call.key_heads = q[2];
    call.dim = q[3];
    call.heads = v[2];
    call.rows = v[3];
    call.per_key = inputs[3].ndim() == 4;
    call.out = outputs[0].data<float>();
    call.out_state = outputs[1].data<float>();
    std::vector<Rows> rows(inputs.begin(), inputs.end());
    auto task = [call, rows = std::move(rows)]() mutable {
      std::vector<char> copies[6];
      call.q = rows[0].read<float>(copies[0]);
      call.k = rows[1].read<float>(copies[1]);
      call.v = rows[2].read<float>(copies[2]);
      call.decay = rows[3].read<float>(copies[3]);
      call.state = rows[4].read<float>(copies[4]);
      if (rows.size() > 5) call.beta = rows[5].read<float>(copies[5]);
      run_recurrence(Pool::shared(), best_kernels(), call);
    };
    mx::cpu::get_command_encoder(stream()).dispatch(std::move(task));
  }

  const char* name() const override { return "HeadraceRecurrence"; }
};

// Inputs: x, weight, and the bias where present.
class Convolution : public Node {
 public:
  using Node::Node;

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    mx::array& out = outputs[0];
    out.set_data(allocated(out.nbytes()));
    if (out.size() == 0) return;
    ConvolutionCall call;
    call.batch = out.shape(0);
    call.tokens = out.shape(1);
    call.channels = out.shape(2);
    call.width = inputs[1].shape(0);
    call.out = out.data<float>();
    std::vector<Rows> rows(inputs.begin(), inputs.end());
    auto task = [call, rows = std::move(rows)]() mutable {
      std::vector<char> copies[3];
      call.x = rows[0].read<float>(copies[0]);
      call.weight = rows[1].read<float>(copies[1]);
      if (rows.size() > 2) call.bias = rows[2].read<float>(copies[2]);
      run_convolution(Pool::shared(), best_kernels(), call);
    };
    mx::cpu::get_command_encoder(stream()).dispatch(std::move(task));
  }

  const char* name() const override { return "HeadraceConvolution"; }
};

// Inputs: gate, and up where present.
class Gated : public Node {
 public:
  Gated(mx::Stream stream, Act act) : Node(stream), act_(act) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    mx::array& out = outputs[0];
    out.set_data(allocated(out.nbytes()));
    if (out.size() == 0) return;
    std::vector<Rows> rows(inputs.begin(), inputs.end());
    auto task = [rows = std::move(rows), n = static_cast<int64_t>(out.size()), act = act_, to = out.data<float>()] {
      std::vector<char> copies[2];
      const float* gate = rows[0].read<float>(copies[0]);
      run_gated(Pool::shared(), best_kernels(), gate, rows.size() > 1 ? rows[1].read<float>(copies[1]) : nullptr, n, act, to);
    };
    mx::cpu::get_command_encoder(stream()).dispatch(std::move(task));
  }

  const char* name() const override { return "HeadraceGated"; }

 private:
  Act act_;
};

}  // namespace

std::pair<mx::array, mx::array> recurrence(const mx::array& q, const mx::array& k, const mx::array& v, const mx::array& decay,
                                           const std::optional<mx::array>& beta, const mx::array& state) {
  require(q.ndim() == 4 && v.ndim() == 4, "q and k must be (B, T, Hk, Dk), v (B, T, Hv, Dv)");
  const int batch = q.shape(0), tokens = q.shape(1), dim = q.shape(3), heads = v.shape(2), rows = v.shape(3);
  require(dim % 16 == 0 && q.shape(2) > 0 && heads % q.shape(2) == 0, "Dk must be a multiple of 16, Hv of Hk");
  require_floats(q, q.shape(), "q must be float32");
  require_floats(k, q.shape(), "k must be float32, like q");
  require_floats(v, {batch, tokens, heads, rows}, "v must be (B, T, Hv, Dv) in float32");
  const mx::Shape gates{batch, tokens, heads}, vectors{batch, tokens, heads, dim};
  require_floats(decay, decay.ndim() == 4 ? vectors : gates, "decay must be (B, T, Hv) or (B, T, Hv, Dk) in float32");
  require_floats(state, {batch, heads, rows, dim}, "the state must be (B, Hv, Dv, Dk) in float32");
  std::vector<mx::array> inputs{q, k, v, decay, state};
  if (beta.has_value()) {
    require_floats(*beta, gates, "beta must be (B, T, Hv) in float32");
    inputs.push_back(*beta);
  }
  auto made = mx::array::make_arrays({v.shape(), state.shape()}, {mx::float32, mx::float32},
                                     std::make_shared<Recurrence>(cpu_stream()), inputs);
  return {made[0], made[1]};
}

mx::array convolve(const mx::array& x, const mx::array& weight, const std::optional<mx::array>& bias) {
  require(x.ndim() == 3 && weight.ndim() == 2 && weight.shape(0) > 0, "x must be (B, T + width - 1, C), the weight (width, C)");
  const int tokens = x.shape(1) - weight.shape(0) + 1, channels = x.shape(2);
  require(tokens >= 0 && x.dtype() == mx::float32, "x must be float32 and as long as the weight at least");
  require_floats(weight, {weight.shape(0), channels}, "the weight must be (width, C) in float32");
  std::vector<mx::array> inputs{x, weight};
  if (bias.has_value()) {
    require_floats(*bias, {channels}, "the bias must be (C) in float32");
    inputs.push_back(*bias);
  }
  return mx::array({x.shape(0), tokens, channels}, mx::float32, std::make_shared<Convolution>(cpu_stream()), std::move(inputs));
}

mx::array gated(const mx::array& gate, const std::optional<mx::array>& up, const std::string& activation) {
  require_floats(gate, gate.shape(), "activations must be float32");
  std::vector<mx::array> inputs{gate};
  require(up.has_value() || activation != "clamped", "a clamped unit needs gate and up");
  if (up.has_value()) {
    require_floats(*up, gate.shape(), "gate and up must be float32 and of the same shape");
    inputs.push_back(*up);
  }
  auto node = std::make_shared<Gated>(cpu_stream(), activation_of(activation));
  return mx::array(gate.shape(), mx::float32, std::move(node), std::move(inputs));
}

}  // namespace headrace
