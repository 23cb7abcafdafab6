// The graph node of recurrent token mixing, and checks of a mixer's sizes and vectors (mixer_primitive.h).
#include "mixer_primitive.h"

#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>

#include "matrix_handle.h"
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

MixerKind kind_of(const std::string& name) {
  if (name == "delta") return MixerKind::delta;
  if (name == "kda") return MixerKind::kda;
  if (name == "ssm") return MixerKind::ssm;
  if (name == "conv") return MixerKind::conv;
  if (name == "scan") return MixerKind::scan;
  if (name == "wkv") return MixerKind::wkv;
  if (name == "shift") return MixerKind::shift;
  throw std::invalid_argument("unknown mixer " + name);
}

// Whether the sizes are those of the kind (core/mixer.h), and small enough that the numbers of a row and of a state are ints.
bool fits(const MixerShape& s) {
  constexpr int64_t kMost = 1 << 20, kMostFloats = std::numeric_limits<int>::max();
  for (const int64_t size : {s.heads, s.key_heads, s.dim, s.rows}) {
    if (size < 0 || size > kMost) return false;
  }
  if (s.heads == 0 || s.rows == 0 || s.projected() > kMostFloats || s.state_floats() > kMostFloats) return false;
  switch (s.kind) {
    case MixerKind::conv: return s.heads == 1 && s.key_heads == 0;
    case MixerKind::scan: return s.key_heads == 1 && s.rows == 1 && s.dim > 0;
    case MixerKind::shift: return s.key_heads == 0 && s.dim == 0;
    case MixerKind::wkv: return s.key_heads == s.heads && s.rows == s.dim && s.dim % 16 == 0;
    default: return s.key_heads > 0 && s.heads % s.key_heads == 0 && s.dim > 0 && s.dim % 16 == 0;
  }
}

// Inputs: x, then the states. Outputs: y, then the new states.
class Mixer : public Node {
 public:
  Mixer(mx::Stream stream, std::shared_ptr<MixerPlan> plan, std::vector<int> counts)
      : Node(stream), plan_(std::move(plan)), counts_(std::move(counts)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    for (mx::array& out : outputs) out.set_data(allocated(out.nbytes()));
    MixerCall call;
    call.shape = plan_->shape();
    call.out = outputs[0].data<float>();
    std::vector<MixerRows> sequences;
    for (size_t i = 0; i < counts_.size(); ++i) {
      sequences.push_back({call.tokens, counts_[i], nullptr, outputs[i + 1].data<float>()});
      call.tokens += counts_[i];
    }
    std::vector<Rows> rows(inputs.begin(), inputs.end());
    auto task = [call, plan = plan_, sequences = std::move(sequences), rows = std::move(rows)]() mutable {
      std::vector<std::vector<char>> copies(rows.size());
      call.x = rows[0].read<float>(copies[0]);
      for (size_t i = 0; i < sequences.size(); ++i) sequences[i].state = rows[i + 1].read<float>(copies[i + 1]);
      call.sequences = sequences.data();
      call.count = static_cast<int64_t>(sequences.size());
      run_mixer(Pool::shared(), best_kernels(), call);
    };
    mx::cpu::get_command_encoder(stream()).dispatch(std::move(task));
  }

  const char* name() const override { return "HeadraceMixer"; }

 private:
  std::shared_ptr<MixerPlan> plan_;
  std::vector<int> counts_;
};

}  // namespace

const float* MixerPlan::keep(const std::optional<mx::array>& vector, const mx::Shape& shape, bool needed) {
  require(vector.has_value() || !needed, "a mixer lacks a vector");
  if (!vector.has_value()) return nullptr;
  require(vector->shape() == shape, "a vector does not fit the mixer");
  vectors_.push_back(settled(mx::astype(*vector, mx::float32, cpu_stream())));
  return vectors_.back().data<float>();
}

MixerPlan::MixerPlan(const std::string& kind, int heads, int key_heads, int dim, int rows, MixerVectors vectors, bool norm_first,
                     float eps, std::pair<float, float> steps, float most_beta, bool gated, bool silu,
                     bool mixes_values) {
  MixerShape& s = shape_;
  s.kind = kind_of(kind);
  s.heads = heads;
  s.key_heads = key_heads;
  s.dim = dim;
  s.rows = rows;
  s.eps = eps;
  s.gated = gated;
  s.act = silu ? Act::silu : Act::none;
  s.mixes_values = mixes_values;
  require(!mixes_values || s.kind == MixerKind::wkv, "only RWKV-7 mixes values");
  require(gated || s.kind == MixerKind::conv, "only a short convolution has no gates");
  require(!silu || !gated, "only a convolution without gates is activated");
  if (!s.convolves()) {
    if (s.kind == MixerKind::shift) s.width = 2;  // the row before is the state
    require(fits(s), "a scan has one head of keys and Dv = 1; RWKV-7 as many of keys, and Dv = Dk, a multiple of 16; a shift no keys");
    keep_unconvolved(vectors);
    return;
  }
  require(vectors.taps.has_value() && vectors.taps->ndim() == 2, "the convolution must be (width, C)");
  s.width = vectors.taps->shape(0);
  require(s.width >= 1 && s.width <= 16, "a convolution sees 1 to 16 tokens");
  require(fits(s), "Dk must be a multiple of 16, Hv of Hk; a short convolution has one head");
  const bool recurs = s.kind != MixerKind::conv;
  const int channels = static_cast<int>(s.channels()), inner = static_cast<int>(s.inner());
  s.taps = keep(vectors.taps, {static_cast<int>(s.width), channels}, true);
  s.tap_bias = keep(vectors.tap_bias, {channels}, false);
  s.rate = keep(vectors.rate, {heads}, recurs);
  s.step_bias = keep(vectors.step_bias, {heads * static_cast<int>(s.head_decays())}, recurs);
  s.most_beta = most_beta;
  s.skip = keep(vectors.skip, {heads}, false);
  require(vectors.wkv.empty(), "only RWKV-7 has vectors of heads");
  if (vectors.norm.has_value()) {
    s.norm_each = vectors.norm->shape() == mx::Shape{rows};
    s.norm_size = vectors.norm->ndim() == 0 ? 0 : vectors.norm->shape(-1);
    require(s.norm_each || (s.norm_size > 0 && inner % s.norm_size == 0), "a norm divides the result evenly");
    const int parts = s.norm_each ? 1 : inner / static_cast<int>(s.norm_size);
    const bool apart = vectors.norm->ndim() == 2;
    s.norm = keep(vectors.norm, apart ? mx::Shape{parts, inner / parts} : mx::Shape{s.norm_each ? rows : inner}, true);
  }
  require(!norm_first || s.norm_each || s.norm == nullptr, "a norm of several heads follows the gate");
  s.norm_first = norm_first;
  s.least_step = steps.first;
  s.most_step = steps.second;
  if (s.by_rule()) {  // x / |x|, q divided by sqrt(Dk), by the RMSNorm kernel
    const float root = std::sqrt(static_cast<float>(dim));
    scales_.assign(2 * static_cast<size_t>(dim), 1.0f / root);
    std::fill_n(scales_.begin(), dim, 1.0f / static_cast<float>(dim));
    s.q_scale = scales_.data();
    s.k_scale = scales_.data() + dim;
  }
}

void MixerPlan::keep_unconvolved(const MixerVectors& vectors) {
  MixerShape& s = shape_;
  const bool scans = s.kind == MixerKind::scan, shifts = s.kind == MixerKind::shift;
  const int heads = static_cast<int>(s.heads), dim = static_cast<int>(s.dim);
  for (const auto& vector : {vectors.tap_bias, vectors.step_bias, vectors.norm}) {
    require(!vector.has_value(), "a scan, RWKV-7 and a shift have no bias and no such norm");
  }
  require(shifts || !vectors.taps.has_value(), "neither a scan nor RWKV-7 has a convolution");
  require(scans || (!vectors.rate.has_value() && !vectors.skip.has_value()), "RWKV-7 and a shift have no rate and skip nothing");
  require(vectors.wkv.size() == (scans || shifts ? 0 : 5), "RWKV-7 has five vectors of heads, and a scan or a shift none");
  s.rate = keep(vectors.rate, {heads, dim}, scans);
  s.skip = keep(vectors.skip, {heads}, false);
  if (shifts) s.taps = keep(vectors.taps, {heads, static_cast<int>(s.rows)}, true);
  if (scans || shifts) return;
  const float* kept[5];
  for (size_t i = 0; i < 5; ++i) kept[i] = keep(vectors.wkv[i], {heads, dim}, true);
  s.wkv = {kept[0], kept[1], kept[2], kept[3], kept[4]};
}

std::pair<mx::array, std::vector<mx::array>> mix_pass(const mx::array& x, const std::vector<mx::array>& states,
                                                      const std::vector<int>& counts, const std::shared_ptr<MixerPlan>& plan) {
  const MixerShape& shape = plan->shape();
  const int rows = std::accumulate(counts.begin(), counts.end(), 0);
  require(x.dtype() == mx::float32 && x.shape() == mx::Shape{1, rows, static_cast<int>(shape.projected())},
          "x must be (1, N, projected) in float32");
  require(states.size() == counts.size(), "every sequence has a state");
  const mx::Shape of_state{static_cast<int>(shape.state_floats())};
  std::vector<mx::array> inputs{x};
  std::vector<mx::Shape> shapes{{1, rows, static_cast<int>(shape.inner())}};
  for (size_t i = 0; i < states.size(); ++i) {
    require(counts[i] >= 1 && states[i].dtype() == mx::float32 && states[i].shape() == of_state, "a state does not fit the mixer");
    inputs.push_back(states[i]);
    shapes.push_back(of_state);
  }
  const std::vector<mx::Dtype> types(shapes.size(), mx::float32);
  auto made = mx::array::make_arrays(std::move(shapes), types, std::make_shared<Mixer>(cpu_stream(), plan, counts), inputs);
  return {made[0], {made.begin() + 1, made.end()}};
}

}  // namespace headrace
