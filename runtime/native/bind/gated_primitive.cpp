// The graph node of activations of gated units (gated_primitive.h).
#include "gated_primitive.h"

#include <memory>
#include <stdexcept>
#include <vector>

#include "../core/gated.h"
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

mx::array gated(const mx::array& gate, const std::optional<mx::array>& up, const std::string& activation) {
  require_floats(gate, gate.shape(), "activations must be float32");
  std::vector<mx::array> inputs{gate};
  const Act act = activation_of(activation);
  require(gates(act), "this activation gates nothing");
  require(up.has_value() || act != Act::clamped, "a clamped unit needs gate and up");
  if (up.has_value()) {
    require_floats(*up, gate.shape(), "gate and up must be float32 and of the same shape");
    inputs.push_back(*up);
  }
  auto node = std::make_shared<Gated>(cpu_stream(), act);
  return mx::array(gate.shape(), mx::float32, std::move(node), std::move(inputs));
}

}  // namespace headrace
