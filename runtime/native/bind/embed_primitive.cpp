// The graph node of embedding lookup (embed_primitive.h).
#include "embed_primitive.h"

#include <limits>
#include <utility>

#include "../core/embed.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "node.h"
#include "strided.h"
#include "weight_arena.h"

namespace headrace {
namespace {

class Embed : public Node {
 public:
  Embed(mx::Stream stream, std::shared_ptr<MatrixHandle> w, std::optional<int> first) : Node(stream), w_(std::move(w)), first_(first) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    mx::array& out = outputs[0];
    out.set_data(allocated(out.nbytes()));
    const auto count = static_cast<int64_t>(inputs[0].size());
    auto task = [w = w_, first = first_, count, tokens = Rows(inputs[0]), to = out.data<float>()] {
      std::vector<char> copy;
      const float outside = first.has_value() ? 0.0f : std::numeric_limits<float>::quiet_NaN();
      run_embed(w->view(), tokens.read<uint32_t>(copy), count, to, first.value_or(0), outside);
    };
    mx::cpu::get_command_encoder(stream()).dispatch(std::move(task));
  }

  const char* name() const override { return "HeadraceEmbed"; }

 private:
  std::shared_ptr<MatrixHandle> w_;
  std::optional<int> first_;
};

}  // namespace

mx::array embed(const mx::array& tokens, const std::shared_ptr<MatrixHandle>& w, std::optional<int> first) {
  // A negative int32 becomes a uint32 beyond every table.
  const bool words = tokens.dtype() == mx::int32 || tokens.dtype() == mx::uint32;
  const mx::array rows = words ? tokens : mx::astype(tokens, mx::int32, cpu_stream());
  mx::Shape shape = tokens.shape();
  shape.push_back(static_cast<int>(w->view().k));
  return mx::array(std::move(shape), mx::float32, std::make_shared<Embed>(cpu_stream(), w, first), {rows});
}

}  // namespace headrace
