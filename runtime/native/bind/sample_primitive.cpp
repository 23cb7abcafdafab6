// See sample_primitive.h.
#include "sample_primitive.h"

#include <memory>
#include <stdexcept>
#include <utility>

#include "../core/pool.h"
#include "../core/sample.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "node.h"
#include "strided.h"

namespace headrace {
namespace {

// Inputs: logits, and keys where tokens are drawn. Output: tokens.
class Sample : public Node {
 public:
  Sample(mx::Stream stream, const SampleRule& rule) : Node(stream), rule_(rule) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    mx::array& out = outputs[0];
    out.set_data(mx::allocator::malloc(out.nbytes()));
    const bool draws = inputs.size() == 2;
    auto task = [rule = rule_, draws, batch = inputs[0].shape(0), n = inputs[0].shape(1), logits = Rows(inputs[0]),
                 keys = Rows(inputs[draws ? 1 : 0]), to = out.data<uint32_t>()] {
      std::vector<char> logits_copy, keys_copy;
      const float* row = logits.read<float>(logits_copy);
      const uint32_t* key = draws ? keys.read<uint32_t>(keys_copy) : nullptr;
      const Kernels& kernels = best_kernels();
      Pool::shared().label(Work::sampling);
      Pool::shared().run(batch, [&](Tasks& tasks) {
        while (tasks.next()) {
          const int64_t b = tasks.index();
          const float* x = row + b * n;
          to[b] = draws ? sample(kernels, x, n, rule, uint64_t{key[2 * b]} << 32 | key[2 * b + 1])
                        : likeliest(kernels, x, n);
        }
      });
    };
    mx::cpu::get_command_encoder(stream()).dispatch(std::move(task));
  }

  const char* name() const override { return "HeadraceSample"; }

 private:
  SampleRule rule_;
};

void require(bool fits, const char* what) {
  if (!fits) throw std::invalid_argument(what);
}

}  // namespace

mx::array sample_tokens(const mx::array& logits, const std::optional<mx::array>& keys, float temperature, int top_k,
                        double top_p, float min_p) {
  require(logits.dtype() == mx::float32 && logits.ndim() == 2 && logits.shape(1) > 0, "logits must be (B, V) float32");
  require(!keys.has_value() || (keys->dtype() == mx::uint32 && keys->shape() == mx::Shape{logits.shape(0), 2}),
          "keys must be (B, 2) uint32");
  require(!keys.has_value() || temperature > 0, "a temperature must be above 0");
  std::vector<mx::array> inputs{logits};
  if (keys.has_value()) inputs.push_back(*keys);
  return mx::array({logits.shape(0)}, mx::uint32,
                   std::make_shared<Sample>(cpu_stream(), SampleRule{temperature, top_k, top_p, min_p}), std::move(inputs));
}

}  // namespace headrace
