// The graph node of token selection (sample_primitive.h).
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
#include "weight_arena.h"

namespace headrace {
namespace {

// Input: logits. Output: tokens.
class Sample : public Node {
 public:
  Sample(mx::Stream stream, std::vector<SampleRow> rows) : Node(stream), rows_(std::move(rows)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    mx::array& out = outputs[0];
    out.set_data(allocated(out.nbytes()));
    auto task = [rows = rows_, batch = inputs[0].shape(0), n = inputs[0].shape(1), logits = Rows(inputs[0]),
                 to = out.data<uint32_t>()] {
      std::vector<char> copy;
      const float* first = logits.read<float>(copy);
      const Kernels& kernels = best_kernels();
      Pool::shared().label(Work::sampling);
      Pool::shared().run(batch, [&](Tasks& tasks) {
        while (tasks.next()) {
          const int64_t b = tasks.index();
          const float* x = first + b * n;
          const bool draws = !rows.empty() && rows[b].rule.temperature > 0;
          to[b] = draws ? sample(kernels, x, n, rows[b].rule, rows[b].random) : likeliest(kernels, x, n);
        }
      });
    };
    mx::cpu::get_command_encoder(stream()).dispatch(std::move(task));
  }

  const char* name() const override { return "HeadraceSample"; }

 private:
  std::vector<SampleRow> rows_;
};

void require(bool fits, const char* what) {
  if (!fits) throw std::invalid_argument(what);
}

}  // namespace

mx::array sample_tokens(const mx::array& logits, std::vector<SampleRow> rows) {
  require(logits.dtype() == mx::float32 && logits.ndim() == 2 && logits.shape(1) > 0, "logits must be (B, V) float32");
  require(rows.empty() || static_cast<int>(rows.size()) == logits.shape(0), "every row of logits needs a rule");
  for (const SampleRow& row : rows) require(row.rule.temperature >= 0, "a temperature must be 0 or more");
  return mx::array({logits.shape(0)}, mx::uint32, std::make_shared<Sample>(cpu_stream(), std::move(rows)), {logits});
}

}  // namespace headrace
