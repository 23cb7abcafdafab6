// The Python module headrace.runtime._native. Its stub is runtime/_native.pyi: a changed signature changes both. runtime/ops/native.py and
// native_plans.py are the main callers. Guard: tests/runtime/ops/test_native_process.py (bindings refuse shapes that do not fit);
// tests/fuzz/targets/kernels.py calls them with any shape, type and stride.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>

#include "../core/blocks.h"
#include "../core/pool.h"
#include "../core/streaming.h"
#include "attend_primitive.h"
#include "cache_blocks.h"
#include "embed_primitive.h"
#include "experts_primitive.h"
#include "gated_primitive.h"
#include "layer_primitive.h"
#include "linear_primitive.h"
#include "matrix_handle.h"
#include "mixer_primitive.h"
#include "peer_primitive.h"
#include "sample_primitive.h"
#include "weight_arena.h"

namespace nb = nanobind;
using namespace nb::literals;
namespace hr = headrace;

namespace {

using Optional = std::optional<hr::mx::array>;

constexpr auto kPatience = std::chrono::milliseconds(100);  // between looks at Ctrl-C

// Fills matrices in order until some time has passed. Returns their number.
size_t fill(const std::vector<std::shared_ptr<hr::MatrixHandle>>& matrices) {
  const auto end = std::chrono::steady_clock::now() + kPatience;
  size_t filled = 0;
  while (filled < matrices.size() && (filled == 0 || std::chrono::steady_clock::now() < end)) matrices[filled++]->fill();
  return filled;
}

using Bytes = nb::ndarray<const uint8_t, nb::c_contig, nb::device::cpu>;
using OutBytes = nb::ndarray<uint8_t, nb::c_contig, nb::device::cpu>;
using Numbers = nb::ndarray<nb::c_contig, nb::device::cpu>;

// Unpacks GGUF blocks into arrays of whole groups. Returns whether all scales and biases are finite, and exact in their arrays' type.
std::pair<bool, bool> unpack_blocks(const std::string& name, const Bytes& blocks, const OutBytes& codes,
                                    const std::optional<Numbers>& scales, const std::optional<Numbers>& biases) {
  const hr::BlockType* type = hr::block_type(name);
  if (type == nullptr) throw std::invalid_argument("unknown type of blocks");
  const size_t count = blocks.size() / static_cast<size_t>(type->bytes);
  const size_t weights = count * static_cast<size_t>(type->weights);
  if (count * static_cast<size_t>(type->bytes) != blocks.size()) throw std::invalid_argument("a block is not whole");
  if (codes.size() != weights / 8 * static_cast<size_t>(type->bits)) throw std::invalid_argument("codes do not fit the blocks");
  if (scales.has_value() != biases.has_value()) throw std::invalid_argument("scales and biases come together");
  hr::AffineGroups to{codes.data(), hr::Type::f32, nullptr, nullptr};
  if (scales.has_value()) {
    const size_t groups = weights / static_cast<size_t>(type->group);
    if (scales->size() != groups || biases->size() != groups) throw std::invalid_argument("scales do not fit the blocks");
    constexpr auto kFloat = static_cast<uint8_t>(nb::dlpack::dtype_code::Float);
    const nb::dlpack::dtype kind = scales->dtype();
    if (kind != biases->dtype() || kind.code != kFloat || kind.lanes != 1 || (kind.bits != 16 && kind.bits != 32)) {
      throw std::invalid_argument("scales and biases are both float16 or both float32");
    }
    to.type = kind.bits == 16 ? hr::Type::f16 : hr::Type::f32;
    to.scales = scales->data();
    to.biases = biases->data();
  }
  const nb::gil_scoped_release release;
  const hr::Unpacked unpacked = hr::unpack_blocks(hr::Pool::shared(), *type, blocks.data(), static_cast<int64_t>(count), to);
  return {unpacked.finite, unpacked.exact};
}

// Kind of work -> (regions, wall, waiting, workers' busy time), nanoseconds.
nb::dict region_times() {
  constexpr const char* kNames[] = {"weights", "attention", "sampling"};
  nb::dict out;
  for (int i = 0; i < static_cast<int>(hr::Work::kCount); ++i) {
    const hr::WorkTimes times = hr::Pool::shared().times(static_cast<hr::Work>(i));
    out[kNames[i]] = nb::make_tuple(times.regions, times.wall, times.waiting, times.workers_busy);
  }
  return out;
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "headrace's CPU kernels as nodes of MLX's lazy graph.";
  if (!hr::have_kernels()) throw nb::import_error("this processor lacks the instruction sets they were compiled for");

  nb::class_<hr::MatrixHandle>(m, "Matrix")
      .def(nb::new_([](const hr::mx::array& data, const Optional& scales, const Optional& biases, const Optional& bias,
                       int bits, int group, const std::string& mode, bool exact, bool later) {
             auto matrix = std::make_shared<hr::MatrixHandle>(data, scales, biases, bias, bits, group, mode, exact);
             const nb::gil_scoped_release release;
             if (!later) matrix->fill();
             return matrix;
           }),
           "data"_a, "scales"_a.none(), "biases"_a.none(), "bias"_a.none(), "bits"_a, "group_size"_a,
           "mode"_a = "affine", "exact"_a = false, "later"_a = false)
      .def("add_low_rank", &hr::MatrixHandle::add_low_rank, "a"_a, "scales"_a, "factors"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("low_rank_arrays", &hr::MatrixHandle::low_rank_arrays)
      .def_prop_ro("data", &hr::MatrixHandle::data)
      .def_prop_ro("scales", &hr::MatrixHandle::scales)
      .def_prop_ro("biases", &hr::MatrixHandle::offsets)
      .def_prop_ro("bias", &hr::MatrixHandle::bias);
  nb::class_<hr::Rope>(m, "Rope").def_prop_ro("dims", &hr::Rope::dims);
  nb::class_<hr::AttentionPlan>(m, "AttentionPlan")
      .def(nb::new_([](int heads, int kv_heads, int dim, float scale, std::shared_ptr<hr::Rope> rope,
                       const Optional& q_norm, const Optional& k_norm, float norm_eps, std::optional<int> window,
                       std::optional<float> softcap, const Optional& sinks, bool norm_last,
                       std::optional<std::tuple<float, int, int>> growth, bool v_norm, int parts, bool chunked) {
             return std::make_shared<hr::AttentionPlan>(heads, kv_heads, dim, scale, std::move(rope), q_norm, k_norm,
                                                        norm_eps, window, softcap, sinks, norm_last, growth, v_norm, parts,
                                                        chunked);
           }),
           "heads"_a, "kv_heads"_a, "head_dim"_a, "scale"_a, "rope"_a.none(), "q_norm"_a.none(), "k_norm"_a.none(),
           "norm_eps"_a, "window"_a.none(), "softcap"_a.none(), "sinks"_a.none() = nb::none(), "norm_last"_a = false,
           "growth"_a.none() = nb::none(), "v_norm"_a = false, "parts"_a = 3, "chunked"_a = false);

  nb::class_<hr::ExpertsPlan>(m, "ExpertsPlan")
      .def(nb::new_([](std::shared_ptr<hr::MatrixHandle> router, std::shared_ptr<hr::MatrixHandle> gate,
                       std::shared_ptr<hr::MatrixHandle> up, std::shared_ptr<hr::MatrixHandle> down, int active,
                       bool normalized, const std::string& activation, bool sigmoid, const Optional& correction, float scale,
                       std::pair<int, int> groups, const Optional& router_norm, const Optional& expert_scale, bool residual, int best,
                       bool before) {
             return std::make_shared<hr::ExpertsPlan>(std::move(router), std::move(gate), std::move(up), std::move(down), active,
                                                      normalized, activation, hr::RouterRule{sigmoid, scale, groups, best, before}, correction,
                                                      router_norm, expert_scale, residual);
           }),
           "router"_a, "gate"_a.none(), "up"_a, "down"_a, "active"_a, "normalized"_a, "activation"_a, "sigmoid"_a = false,
           "correction"_a.none() = nb::none(), "scale"_a = 1.0f, "groups"_a = std::pair<int, int>(1, 1),
           "router_norm"_a.none() = nb::none(), "expert_scale"_a.none() = nb::none(), "residual"_a = true,
           "best"_a = 2, "before"_a = false);
  nb::class_<hr::LayerNorms>(m, "LayerNorms")
      .def(nb::new_([](const Optional& input, const Optional& attention_post, const Optional& mlp, const Optional& mlp_post,
                       const Optional& after_dense, const Optional& before_experts, const Optional& after_experts,
                       const Optional& scalar) {
             return hr::LayerNorms{input, attention_post, mlp, mlp_post, after_dense, before_experts, after_experts, scalar};
           }),
           "input"_a.none(), "attention_post"_a.none(), "mlp"_a.none(), "mlp_post"_a.none(), "after_dense"_a.none() = nb::none(),
           "before_experts"_a.none() = nb::none(), "after_experts"_a.none() = nb::none(), "scalar"_a.none() = nb::none());
  nb::class_<hr::LayerPlan>(m, "LayerPlan")
      .def(nb::new_([](std::shared_ptr<hr::AttentionPlan> attention, hr::Matrices qkv,
                       std::shared_ptr<hr::MatrixHandle> output, std::shared_ptr<hr::MatrixHandle> gate_up,
                       std::shared_ptr<hr::MatrixHandle> down, float eps, const std::string& activation,
                       std::shared_ptr<hr::ExpertsPlan> experts, std::shared_ptr<hr::MixerPlan> mixer,
                       hr::Gates gates, const hr::LayerNorms& norms, const std::optional<hr::OwnInput>& own_input,
                       const std::optional<hr::Gates>& mixer_ends, const hr::CurveNumbers& curve) {
             return std::make_shared<hr::LayerPlan>(std::move(attention), std::move(qkv), std::move(output), std::move(gate_up),
                                                    std::move(down), eps, activation, std::move(experts), std::move(mixer),
                                                    std::move(gates), norms, own_input, mixer_ends, curve);
           }),
           "attention"_a.none(), "qkv"_a, "output"_a, "gate_up"_a.none(), "down"_a.none(), "eps"_a, "activation"_a,
           "experts"_a.none(), "mixer"_a.none(), "gates"_a, "norms"_a, "own_input"_a.none() = nb::none(),
           "mixer_ends"_a.none() = nb::none(), "curve"_a.none() = nb::none());

  nb::class_<hr::MixerPlan>(m, "MixerPlan")
      .def(nb::new_([](const std::string& kind, int heads, int key_heads, int dim, int rows, const Optional& taps,
                       const Optional& tap_bias, const Optional& rate, const Optional& step_bias, const Optional& skip,
                       const Optional& norm, bool norm_first, float eps, std::pair<float, float> steps, float most_beta,
                       const std::vector<hr::mx::array>& wkv, bool gated, bool silu, bool mixes_values) {
             return std::make_shared<hr::MixerPlan>(kind, heads, key_heads, dim, rows,
                                                    hr::MixerVectors{taps, tap_bias, rate, step_bias, skip, norm, wkv},
                                                    norm_first, eps, steps, most_beta, gated, silu, mixes_values);
           }),
           "kind"_a, "heads"_a, "key_heads"_a, "key_dim"_a, "value_dim"_a, "taps"_a.none(), "tap_bias"_a.none(), "rate"_a.none(),
           "step_bias"_a.none(), "skip"_a.none(), "norm"_a.none(), "norm_first"_a, "eps"_a, "steps"_a,
           "most_beta"_a = 1.0f, "wkv"_a = std::vector<hr::mx::array>(), "gated"_a = true, "silu"_a = false,
           "mixes_values"_a = false)
      .def_prop_ro("state_floats", [](const hr::MixerPlan& plan) { return plan.shape().state_floats(); });

  nb::class_<hr::Packings>(m, "Packings")
      .def(nb::new_(&hr::packings_of), "key_bits"_a, "key_group"_a, "value_bits"_a, "value_group"_a);
  nb::class_<hr::Pass>(m, "Pass")
      .def(nb::new_([](const std::vector<int>& counts, const std::vector<int>& offsets, const std::vector<bool>& prefill,
                       const std::vector<hr::Pass::Tables>& tables,
                       const std::vector<std::vector<hr::mx::array>>& slabs, const hr::Packings& packings,
                       const std::vector<int>& dims) {
             return std::make_shared<hr::Pass>(counts, offsets, prefill, tables, slabs, packings, dims);
           }),
           "counts"_a, "offsets"_a, "prefill"_a, "tables"_a, "slabs"_a, "packings"_a = hr::Packings{},
           "head_dims"_a = std::vector<int>());

  nb::class_<hr::Peer>(m, "Peer")
      .def(nb::new_([](int socket, int rank) { return std::make_shared<hr::Peer>(socket, rank); }), "socket"_a, "rank"_a)
      .def("all_sum", &hr::Peer::all_sum, "x"_a)
      .def("all_gather", &hr::Peer::all_gather, "x"_a)
      .def("gather_columns", &hr::Peer::gather_columns, "x"_a, "others"_a)
      .def("send", &hr::Peer::send, "x"_a)
      .def("receive", [](hr::Peer& peer, const std::vector<int>& shape, hr::mx::Dtype dtype, hr::mx::Stream stream) {
        return peer.receive(hr::mx::Shape(shape.begin(), shape.end()), dtype, stream);
      }, "shape"_a, "dtype"_a, "stream"_a);

  m.def("make_rope", &hr::make_rope, "periods"_a, "amplitude"_a);
  m.def("embed", &hr::embed, "tokens"_a, "w"_a, "first"_a.none() = nb::none());
  m.def("linear", &hr::linear, "x"_a, "w"_a, "norm"_a.none() = nb::none(), "eps"_a = 0.0f,
        "residual"_a.none() = nb::none(), "activation"_a = "", "rounding"_a = 16, "curve"_a.none() = nb::none());
  m.def("experts", &hr::experts, "x"_a, "norm"_a, "eps"_a, "plan"_a);
  m.def("expert_linear", &hr::expert_linear, "x"_a, "indices"_a, "w"_a, "experts"_a);
  m.def("rms_norm", &hr::rms_norm, "x"_a, "weight"_a, "eps"_a);
  m.def("layer_norm", &hr::layer_norm, "x"_a, "weight"_a, "bias"_a.none(), "eps"_a);
  m.def("layers", &hr::layers, "x"_a, "keys"_a, "values"_a, "offset"_a, "plans"_a,
        "firsts"_a = std::vector<int>(), "prefill"_a = true, "rounding"_a = 16, "wanted"_a = -1,
        "peer"_a.none() = nb::none());
  m.def("attend", &hr::attend, "qkv"_a, "keys"_a, "values"_a, "offset"_a, "plan"_a, "first"_a = 0,
        "prefill"_a = true);
  m.def("rotate_heads", &hr::rotate_heads, "x"_a, "rope"_a, "offset"_a);
  m.def("attend_heads", &hr::attend_heads, "q"_a, "keys"_a, "values"_a, "scale"_a, "prefill"_a, "mask"_a.none() = nb::none(),
        "sinks"_a.none() = nb::none());
  m.def("gated", &hr::gated, "gate"_a, "up"_a.none(), "activation"_a);
  m.def("mix_pass", &hr::mix_pass, "x"_a, "states"_a, "counts"_a, "plan"_a);
  m.def("layers_pass", &hr::layers_pass, "x"_a, "rows"_a, "places"_a, "plans"_a,
        "states"_a = std::vector<std::vector<hr::mx::array>>(), "kept"_a = 0, "rounding"_a = 16, "wanted"_a = -1,
        "peer"_a.none() = nb::none());
  m.def("attend_pass", &hr::attend_pass, "qkv"_a, "rows"_a, "group"_a, "index"_a, "plan"_a,
        "appends_only"_a = false);
  m.def("cut_block", &hr::cut_block, "block"_a, "entries"_a, "packings"_a, "head_dim"_a);
  m.def("write_block", &hr::write_block, "slab"_a, "block"_a, "entries"_a);
  m.def("slab", [](const std::vector<int>& shape, hr::mx::Dtype dtype) {
    return hr::zeros_on_lines(hr::mx::Shape(shape.begin(), shape.end()), dtype);
  }, "shape"_a, "dtype"_a);
  m.def("free_unused_slabs", &hr::free_unused_slabs, nb::call_guard<nb::gil_scoped_release>());
  m.def("fill", &fill, "matrices"_a, nb::call_guard<nb::gil_scoped_release>());
  m.def("unpack_blocks", &unpack_blocks, "kind"_a, "blocks"_a.noconvert(), "codes"_a.noconvert(), "scales"_a.noconvert().none(),
        "biases"_a.noconvert().none());
  m.def("grow", &hr::grow_buffer, "buffer"_a, "capacity"_a);

  m.def("sample", [](const hr::mx::array& logits, const std::vector<std::tuple<float, int64_t, double, float>>& rules,
                     const std::vector<uint64_t>& keys) {
    if (rules.size() != keys.size()) throw std::invalid_argument("every rule needs a key");
    std::vector<hr::SampleRow> rows;
    for (std::size_t i = 0; i < rules.size(); ++i) {
      const auto& [temperature, top_k, top_p, min_p] = rules[i];
      rows.push_back({{temperature, top_k, top_p, min_p}, keys[i]});
    }
    return hr::sample_tokens(logits, std::move(rows));
  }, "logits"_a, "rules"_a, "keys"_a);

  nb::class_<hr::StreamingRead>(m, "StreamingRead")
      .def(nb::init<std::size_t, int, int>(), "bytes"_a, "threads"_a, "streams"_a, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("bytes", &hr::StreamingRead::bytes)
      .def("one_pass", &hr::StreamingRead::pass, nb::call_guard<nb::gil_scoped_release>());

  m.def("measure_regions", [](bool on) { hr::Pool::shared().measure(on); }, "on"_a);
  m.def("region_times", &region_times);
  m.def("instruction_set", [] { return hr::best_kernels().name; });
  m.def("use_instruction_set", [](const std::string& name) { return hr::use_kernels(name.c_str()); }, "name"_a);
  m.def("threads", [] { return hr::Pool::shared().threads(); });
  m.def("set_threads", [](int threads) { hr::Pool::shared().set_threads(threads); }, "threads"_a);
}
