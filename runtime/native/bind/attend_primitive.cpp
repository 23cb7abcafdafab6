// Graph nodes of attention over caches and over given heads, and of rotation (attend_primitive.h).
#include "attend_primitive.h"

#include <cstring>
#include <limits>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"
#include "node.h"
#include "strided.h"
#include "weight_arena.h"

namespace headrace {
namespace {

// Input: qkv. Output: out.
class Attend : public Node {
 public:
  Attend(mx::Stream stream, std::shared_ptr<AttentionPlan> plan, LayerBlocks blocks, bool appends_only)
      : Node(stream), plan_(std::move(plan)), blocks_(std::move(blocks)), appends_only_(appends_only) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    outputs[0].set_data(allocated(outputs[0].nbytes()));
    AttendCall call = plan_->call();
    call.out = outputs[0].data<float>();
    blocks_.describe(call);
    if (appends_only_) {
      call.wanted = 0;
      std::memset(call.out, 0, outputs[0].nbytes());
    }
    auto task = [call, plan = plan_, blocks = blocks_, qkv = Rows(inputs[0])]() mutable {
      std::vector<char> copy;
      call.qkv = qkv.read<float>(copy);
      run_attend(Pool::shared(), best_kernels(), call);
    };
    mx::cpu::get_command_encoder(stream()).dispatch(std::move(task));
  }

  const char* name() const override { return "HeadraceAttend"; }

 private:
  std::shared_ptr<AttentionPlan> plan_;
  LayerBlocks blocks_;
  bool appends_only_;
};

// Inputs: q, keys, values, then mask and sinks where present.
class AttendHeads : public Node {
 public:
  AttendHeads(mx::Stream stream, float scale, bool prefill, bool masked, bool sinks)
      : Node(stream), scale_(scale), prefill_(prefill), masked_(masked), sinks_(sinks) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    mx::array& out = outputs[0];
    out.set_data(allocated(out.nbytes()));
    if (out.size() == 0) return;
    const mx::array &keys = inputs[1], &values = inputs[2];
    const bool in_place = entries_contiguous(keys) && entries_contiguous(values) && keys.strides() == values.strides();
    const auto entries = int64_t{keys.shape(2)}, item = static_cast<int64_t>(keys.itemsize());
    AttendCall call;
    call.heads = inputs[0].shape(1);
    call.kv_heads = keys.shape(1);
    call.dim = keys.shape(3);
    call.kv_type = type_of(keys.dtype());
    call.rule = {scale_, 0.0f};
    call.head_bytes = (in_place ? keys.strides(1) : entries * call.dim) * item;
    call.out = out.data<float>();
    const int64_t sequence_bytes = in_place ? keys.strides(0) * item : call.kv_heads * call.head_bytes;
    const SequenceRows each{.count = out.shape(1), .offset = entries - out.shape(1),
                            .phase = prefill_ ? Phase::prefill : Phase::decode};
    std::vector<Rows> rows(inputs.begin(), inputs.end());
    auto task = [call, each, sequence_bytes, entries, in_place, batch = out.shape(0), k = keys.data<char>(), v = values.data<char>(),
                 masked = masked_, sinks = sinks_, rows = std::move(rows)]() mutable {
      std::vector<char> copies[5];
      const float* q = rows[0].read<float>(copies[0]);
      const char* from = in_place ? k : rows[1].read<char>(copies[1]);
      call.values_at = (in_place ? v : rows[2].read<char>(copies[2])) - from;
      const uint8_t* visible = masked ? rows[3].read<uint8_t>(copies[3]) : nullptr;
      if (sinks) call.sinks = rows.back().read<float>(copies[4]);
      std::vector<SequenceRows> sequences(static_cast<size_t>(batch), each);
      std::vector<std::vector<char*>> blocks(static_cast<size_t>(batch));
      for (int64_t b = 0; b < batch; ++b) {
        SequenceRows& own = sequences[static_cast<size_t>(b)];
        std::vector<char*>& its = blocks[static_cast<size_t>(b)];
        for (int64_t i = 0; i < entries; i += kBlock) {
          its.push_back(const_cast<char*>(from) + b * sequence_bytes + i * call.dim * size_of(call.kv_type));
        }
        own.row = b * each.count;
        own.blocks = its.data();
        if (visible != nullptr) own.visible = visible + b * each.count * entries;
      }
      call.sequences = sequences.data();
      call.count = batch;
      run_attend_heads(Pool::shared(), best_kernels(), call, q);
    };
    mx::cpu::get_command_encoder(stream()).dispatch(std::move(task));
  }

  const char* name() const override { return "HeadraceAttendHeads"; }

 private:
  static bool entries_contiguous(const mx::array& a) { return a.strides(3) == 1 && (a.strides(2) == a.shape(3) || a.shape(2) == 1); }

  float scale_;
  bool prefill_, masked_, sinks_;
};

class RotateHeads : public Node {
 public:
  RotateHeads(mx::Stream stream, std::shared_ptr<Rope> rope, int64_t offset)
      : Node(stream), rope_(std::move(rope)), offset_(offset) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    mx::array& out = outputs[0];
    out.set_data(allocated(out.nbytes()));
    if (out.size() == 0) return;
    RotateCall call;
    call.tokens = out.shape(2);
    call.count = int64_t{out.shape(0)} * out.shape(1);
    call.dim = out.shape(3);
    call.offset = offset_;
    call.out = out.data<float>();
    auto task = [call, rope = rope_, x = Rows(inputs[0])]() mutable {
      std::vector<char> copy;
      call.x = x.read<float>(copy);
      call.rope = rope.get();
      run_rotate(Pool::shared(), call);
    };
    mx::cpu::get_command_encoder(stream()).dispatch(std::move(task));
  }

  const char* name() const override { return "HeadraceRotateHeads"; }

 private:
  std::shared_ptr<Rope> rope_;
  int64_t offset_;
};

void require(bool fits, const char* what) {
  if (!fits) throw std::invalid_argument(what);
}

}  // namespace

std::shared_ptr<Rope> make_rope(const mx::array& periods, float amplitude) {
  require(periods.ndim() == 1, "rope periods have one dimension");
  const mx::array floats = settled(mx::astype(periods, mx::float32, cpu_stream()));
  return std::make_shared<Rope>(std::vector<float>(floats.data<float>(), floats.data<float>() + floats.size()),
                                amplitude);
}

AttentionPlan::AttentionPlan(int heads, int kv_heads, int dim, float scale, std::shared_ptr<Rope> rope,
                             const std::optional<mx::array>& q_norm, const std::optional<mx::array>& k_norm,
                             float norm_eps, std::optional<int> window, std::optional<float> softcap,
                             const std::optional<mx::array>& sinks, bool norm_last,
                             std::optional<std::tuple<float, int, int>> growth, bool v_norm, int parts, bool chunked)
    : rope_(std::move(rope)) {
  require(heads > 0 && kv_heads > 0 && heads % kv_heads == 0, "query heads must be shared evenly by kv heads");
  require(dim > 0 && dim % 16 == 0, "the head size must be a multiple of 16");
  const int64_t rows = int64_t{heads} + 2 * int64_t{kv_heads};  // of projections: queries, keys and values
  require(rows <= std::numeric_limits<int>::max() / dim, "attention is wider than an array can be");
  require(rope_ == nullptr || rope_->dims() <= dim, "rope rotates more dimensions than a head has");
  require(parts >= 1 && parts <= 3, "a row has queries, then keys, then values");
  vectors_.reserve(4);
  call_.heads = heads;
  call_.kv_heads = kv_heads;
  call_.dim = dim;
  call_.norm_eps = norm_eps;
  call_.norm_last = norm_last;
  if (growth.has_value()) {
    std::tie(call_.growth, call_.growth_length, call_.growth_ahead) = *growth;
    require(call_.growth_length > 0 && call_.growth_ahead >= 0, "queries grow over at least one position");
  }
  call_.rope = rope_.get();
  call_.rule = {scale, softcap.value_or(0.0f)};
  call_.window = window.value_or(0);
  call_.chunked = chunked;
  call_.norm_all = q_norm.has_value() && q_norm->size() != static_cast<size_t>(dim);
  require(!call_.norm_all || !norm_last, "a norm of all heads precedes the rotation");
  call_.q_norm = keep(q_norm, call_.norm_all ? int64_t{heads} * dim : dim);
  call_.k_norm = keep(k_norm, call_.norm_all ? int64_t{kv_heads} * dim : dim);
  call_.sinks = keep(sinks, heads);
  call_.parts = parts;
  if (v_norm) call_.v_norm = keep(mx::ones({dim}), dim);
}

const float* AttentionPlan::keep(const std::optional<mx::array>& vector, int64_t size) {
  if (!vector.has_value()) return nullptr;
  require(vector->shape() == mx::Shape{static_cast<int>(size)}, "head norms must be (D,) or of all heads, sinks (H,)");
  vectors_.push_back(settled(mx::astype(*vector, mx::float32, cpu_stream())));
  return vectors_.back().data<float>();
}

namespace {

mx::array attended(const mx::array& qkv, const std::shared_ptr<AttentionPlan>& plan, LayerBlocks blocks, bool appends_only = false) {
  mx::Shape out{qkv.shape(0), qkv.shape(1), static_cast<int>(plan->call().heads * plan->call().dim)};
  auto node = std::make_shared<Attend>(cpu_stream(), plan, std::move(blocks), appends_only);
  return mx::array(std::move(out), mx::float32, std::move(node), {qkv});
}

void require_projections(const mx::array& qkv, const AttendCall& call) {
  require(qkv.dtype() == mx::float32, "activations must be float32");
  require(qkv.ndim() == 3 && qkv.shape(2) == call.projected(), "qkv must be (B, T, (H + 2 Hkv) * D), or some of these parts");
}

}  // namespace

mx::array attend(const mx::array& qkv, const mx::array& keys, const mx::array& values, int offset,
                 const std::shared_ptr<AttentionPlan>& plan, int first, bool prefill) {
  const AttendCall& call = plan->call();
  require_projections(qkv, call);
  const Phase phase = prefill ? Phase::prefill : Phase::decode;
  return attended(qkv, plan, contiguous_blocks(keys, values, call, qkv.shape(0), qkv.shape(1), offset, first, phase));
}

mx::array rotate_heads(const mx::array& x, const std::shared_ptr<Rope>& rope, int offset) {
  require(x.ndim() == 4 && x.dtype() == mx::float32 && x.shape(3) >= rope->dims() && offset >= 0,
          "heads must be (B, H, T, D) in float32, D the rotated dimensions, at positions from 0 on");
  return mx::array(x.shape(), mx::float32, std::make_shared<RotateHeads>(cpu_stream(), rope, offset), {x});
}

mx::array attend_heads(const mx::array& q, const mx::array& keys, const mx::array& values, float scale, bool prefill,
                       const std::optional<mx::array>& mask, const std::optional<mx::array>& sinks) {
  require(q.ndim() == 4 && q.dtype() == mx::float32 && q.shape(3) > 0 && q.shape(3) % 16 == 0,
          "queries must be (B, H, T, D) in float32, D a multiple of 16");
  const int batch = q.shape(0), heads = q.shape(1), length = q.shape(2);
  require(keys.ndim() == 4 && keys.shape() == values.shape() && keys.dtype() == values.dtype() && keys.shape(0) == batch &&
              keys.shape(1) > 0 && heads % keys.shape(1) == 0 && keys.shape(2) >= length && keys.shape(3) == q.shape(3),
          "keys and values must be (B, Hkv, S, D)");
  type_of(keys.dtype());
  std::vector<mx::array> inputs{q, keys, values};
  if (mask.has_value()) {
    require(prefill && mask->dtype() == mx::bool_ && mask->shape() == mx::Shape{batch, 1, length, keys.shape(2)},
            "a mask must be (B, 1, T, S) bool, for prompt tokens");
    inputs.push_back(*mask);
  }
  if (sinks.has_value()) {
    require(sinks->shape() == mx::Shape{heads}, "sinks must be (H)");
    inputs.push_back(mx::astype(*sinks, mx::float32, cpu_stream()));
  }
  auto node = std::make_shared<AttendHeads>(cpu_stream(), scale, prefill, mask.has_value(), sinks.has_value());
  return mx::array({batch, length, heads, q.shape(3)}, mx::float32, std::move(node), std::move(inputs));
}

mx::array attend_pass(const mx::array& qkv, const std::shared_ptr<Pass>& pass, int group, int index,
                      const std::shared_ptr<AttentionPlan>& plan, bool appends_only) {
  require_projections(qkv, plan->call());
  require(qkv.shape(0) == 1 && qkv.shape(1) == pass->rows(), "qkv must have the rows of the pass");
  return attended(qkv, plan, pass->layer(group, index, plan->call()), appends_only);
}

}  // namespace headrace
