// A projection's arrays: checks of shapes and formats, and the move to the kernels' layout (matrix_handle.h).
#include "matrix_handle.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include "../core/half.h"
#include "../core/interleaved.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"
#include "mlx/transforms.h"
#include "weight_arena.h"

namespace headrace {
namespace {

void require(bool fits, const char* what) {
  if (!fits) throw std::invalid_argument(what);
}

bool known_width(int bits) {
  return bits == 2 || bits == 3 || bits == 4 || bits == 5 || bits == 6 || bits == 8;
}

// `a`, which is evaluated, row-contiguous. An evaluation takes tens of microseconds, longer than the move of most arrays.
mx::array row_contiguous(const mx::array& a) { return a.flags().row_contiguous ? a : settled(a); }

// Arrays of the same columns, whose rows follow each other: one, or parts that need not be joined in memory first.
using Parts = std::vector<mx::array>;

// The parts of a concatenation of rows that MLX has not made yet; none of another array.
Parts unjoined(const mx::array& a) {
  if (a.status() != mx::array::Status::unscheduled || !a.has_primitive()) return {};
  if (std::strcmp(a.primitive().name(), "Concatenate") != 0) return {};  // MLX exports no types for a dynamic_cast
  const bool joins_rows = static_cast<const mx::Concatenate&>(a.primitive()).state() == 0;
  return joins_rows ? a.inputs() : Parts{};
}

// Arrays of the same rows, all in parts of the same rows, which are whole bands; else each whole.
std::vector<Parts> in_parts(const std::vector<mx::array>& arrays) {
  std::vector<Parts> all, whole;
  bool fits = true;
  for (const mx::array& a : arrays) {
    whole.push_back({a});
    all.push_back(unjoined(a));
    const Parts &first = all.front(), &parts = all.back();
    fits = fits && !parts.empty() && parts.size() == first.size();
    for (size_t i = 0; fits && i < parts.size(); ++i) {
      fits = parts[i].shape(0) == first[i].shape(0) && (i + 1 == parts.size() || parts[i].shape(0) % kBand == 0);
    }
  }
  return fits ? all : whole;
}

// (N, columns) -> (bands, columns, kBand), in huge pages.
template <class T>
mx::array interleaved(const Parts& parts) {
  int64_t rows = 0;
  for (const mx::array& part : parts) rows += part.shape(0);
  const int columns = parts[0].shape(1);
  mx::array out = in_huge_pages({static_cast<int>(bands(rows)), columns, static_cast<int>(kBand)}, parts[0].dtype());
  T* to = out.data<T>();
  for (const mx::array& part : parts) {
    interleave(Pool::shared(), part.data<T>(), part.shape(0), columns, to);
    to += int64_t{part.shape(0)} * columns;
  }
  return out;
}

mx::array interleaved(const Parts& parts) {
  if (parts[0].itemsize() == 1) return interleaved<uint8_t>(parts);
  return parts[0].itemsize() == 4 ? interleaved<uint32_t>(parts) : interleaved<uint16_t>(parts);
}

// The same for data of 5 or 6 bits, which is split into planes first.
mx::array interleaved_planes(const Parts& parts, int bits) {
  Parts all_planes;
  for (const mx::array& data : parts) {
    mx::array planes(allocated(data.nbytes()), data.shape(), mx::uint32);
    const int64_t columns = data.shape(1);
    Pool::shared().run(data.shape(0), [&](Tasks& tasks) {
      while (tasks.next()) {
        const int64_t at = tasks.index() * columns;
        split_planes(bits, data.data<uint32_t>() + at, columns, planes.data<uint32_t>() + at);
      }
    });
    all_planes.push_back(planes);
  }
  return interleaved(all_planes);
}

// Whether every offset in float16 is -2^(bits - 1) times its scale, as far as bits show it: all are zeros, or normal numbers whose sign
// is the other one and whose exponent is bits - 1 larger. Without branches, so that compilers use vectors.
bool shifted_exponents(const uint16_t* scales, const uint16_t* offsets, int64_t count, int bits) {
  constexpr uint32_t kNormal = 0x400, kInfinity = 0x7c00, kSign = 0x8000;
  const uint32_t shift = static_cast<uint32_t>(bits - 1) << 10;
  uint32_t fitting = 1;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t scale = scales[i], offset = offsets[i], magnitude = scale & ~kSign;
    const uint32_t shifted = (magnitude - kNormal < kInfinity - shift - kNormal) & ((scale ^ kSign) + shift == offset);
    const uint32_t zero = (magnitude == 0) & ((offset & ~kSign) == 0);
    fitting &= shifted | zero;
  }
  return fitting != 0;
}

// Whether every offset is its scale times -2^(bits - 1), exactly.
template <Type T>
bool symmetric(const mx::array& scales, const mx::array& offsets, int bits) {
  constexpr int64_t kAtOnce = 1 << 14;  // numbers of a task
  const auto middle = static_cast<float>(1 << (bits - 1));
  const auto count = static_cast<int64_t>(scales.size());
  std::atomic<bool> all{true};
  Pool::shared().run((count + kAtOnce - 1) / kAtOnce, [&](Tasks& tasks) {
    while (tasks.next()) {
      const int64_t begin = tasks.index() * kAtOnce, end = std::min(count, begin + kAtOnce);
      if constexpr (T == Type::f16) {
        const auto *at = scales.data<uint16_t>() + begin, *offsets_at = offsets.data<uint16_t>() + begin;
        if (shifted_exponents(at, offsets_at, end - begin, bits)) continue;
      }
      for (int64_t i = begin; i < end && all.load(std::memory_order_relaxed); ++i) {
        if (load_scalar<T>(offsets.data<void>(), i) != -middle * load_scalar<T>(scales.data<void>(), i)) all = false;
      }
    }
  });
  return all;
}

}  // namespace

Type type_of(mx::Dtype dtype) {
  if (dtype == mx::float32) return Type::f32;
  if (dtype == mx::float16) return Type::f16;
  if (dtype == mx::bfloat16) return Type::bf16;
  throw std::invalid_argument("expected float32, float16 or bfloat16");
}

mx::array settled(const mx::array& a) {
  mx::array out = mx::contiguous(a, false, mx::Device(mx::Device::cpu));
  out.eval();
  return out;
}

MatrixHandle::MatrixHandle(const mx::array& data, const std::optional<mx::array>& scales,
                           const std::optional<mx::array>& offsets, const std::optional<mx::array>& bias,
                           int bits, int group, const std::string& mode, bool exact) {
  require(data.ndim() == 2 && data.shape(1) > 0, "a weight has two dimensions, and columns");
  view_.n = data.shape(0);
  view_.exact = exact;
  if (scales.has_value()) {
    const bool affine = mode == "affine";
    require(offsets.has_value() == affine, "affine quantization has scales and biases, any other scales alone");
    if (affine) {
      require(known_width(bits), "bits must be 2, 3, 4, 5, 6 or 8");
      require(group == 32 || group == 64 || group == 128 || (group == 16 && bits == 6),
              "the group size must be 32, 64 or 128, or 16 with 6 bits");
    } else {
      require((mode == "mxfp4" && bits == 4 && group == 32) || (mode == "nvfp4" && bits == 4 && group == 16) ||
                  (mode == "mxfp8" && bits == 8 && group == 32),
              "modes are affine, mxfp4, nvfp4 and mxfp8");
      view_.code = mode == "mxfp8" ? Code::fp8 : Code::fp4;
    }
    require(data.dtype() == mx::uint32, "quantized weights are packed in uint32");
    view_.k = static_cast<int64_t>(data.shape(1)) * 32 / bits;
    view_.bits = bits;
    view_.group = group;
    const mx::Shape expected{data.shape(0), static_cast<int>(view_.k / group)};
    require(view_.k % group == 0 && scales->shape() == expected, "scales must be (N, K / group)");
    if (affine) {
      require(offsets->shape() == expected, "biases must be (N, K / group)");
      require(scales->dtype() == offsets->dtype(), "scales and biases must share a type");
      view_.type = type_of(scales->dtype());
    } else {
      require(scales->dtype() == mx::uint8, "scales of floats are bytes");
      view_.type = mode == "nvfp4" ? Type::e4m3 : Type::e8m0;
    }
  } else {
    view_.k = data.shape(1);
    view_.type = type_of(data.dtype());
  }
  require(!bias.has_value() || bias->shape() == mx::Shape{data.shape(0)}, "a bias must be (N,)");
  sources_ = {data, scales, offsets, bias};
}

void MatrixHandle::fill() {
  if (!sources_.has_value()) return;
  const Sources from = *std::exchange(sources_, std::nullopt);

  // Evaluate all arrays at once. Those to interleave stay in the parts of a concatenation that MLX has not made yet.
  std::vector<mx::array> arrays{from.data};
  if (from.scales.has_value()) arrays.push_back(*from.scales);
  if (from.offsets.has_value()) arrays.push_back(*from.offsets);
  std::vector<Parts> stored;
  if (view_.rounds()) {
    stored = in_parts(arrays);
  } else {
    for (const mx::array& a : arrays) stored.push_back({a});
  }
  Parts all;
  for (const Parts& parts : stored) all.insert(all.end(), parts.begin(), parts.end());
  if (from.bias.has_value()) all.push_back(*from.bias);
  mx::eval(std::move(all));
  for (Parts& parts : stored) {
    for (mx::array& part : parts) part = row_contiguous(part);
  }

  // Move offsets, or drop them if the matrix is symmetric.
  const auto moved = [&](const Parts& parts) { return view_.rounds() ? interleaved(parts) : in_huge_pages(parts[0]); };
  if (from.offsets.has_value()) {
    auto every = symmetric<Type::f32>;
    if (view_.type == Type::f16) every = symmetric<Type::f16>;
    if (view_.type == Type::bf16) every = symmetric<Type::bf16>;
    bool all_symmetric = view_.may_be_symmetric();
    for (size_t i = 0; all_symmetric && i < stored[1].size(); ++i) {
      all_symmetric = every(stored[1][i], stored[2][i], view_.bits);
    }
    if (!all_symmetric) {
      offsets_ = moved(stored[2]);
      view_.offsets = offsets_->data<void>();
    }
  }

  // Move scales and data, and convert the bias.
  if (from.scales.has_value()) {
    scales_ = moved(stored[1]);
    view_.scales = scales_->data<void>();
  }
  data_ = view_.planed() ? interleaved_planes(stored[0], view_.bits) : moved(stored[0]);
  view_.data = data_->data<void>();
  if (from.bias.has_value()) {
    bias_ = settled(mx::astype(*from.bias, mx::float32, mx::Device(mx::Device::cpu)));
    view_.bias = bias_->data<float>();
  }
}

void MatrixHandle::add_low_rank(const mx::array& a, const mx::array& scales,
                                const std::vector<std::pair<int, mx::array>>& factors) {
  require(view_.low_rank == nullptr && !factors.empty(), "a matrix has low-rank products once");
  require(a.ndim() == 2 && a.shape(1) == view_.k, "A must have the columns of the matrix");
  require(scales.dtype() == mx::float32 && scales.shape() == mx::Shape{a.shape(0)}, "scales must be (R,), float32");
  const Type type = type_of(a.dtype());
  std::vector<Factor> parts;
  int64_t first = 0;
  for (const auto& [row, b] : factors) {
    require(b.ndim() == 2 && b.shape(1) > 0, "B must be (rows, rank)");
    require(row >= 0 && row + int64_t{b.shape(0)} <= view_.n, "B must have rows of the matrix");
    parts.push_back({nullptr, type_of(b.dtype()), row, b.shape(0), first, b.shape(1)});
    first += b.shape(1);
  }
  require(first == a.shape(0), "the ranks must be those of A");

  factors_ = std::move(parts);
  low_rank_arrays_ = {in_huge_pages(settled(a)), settled(scales)};
  for (size_t i = 0; i < factors.size(); ++i) {
    low_rank_arrays_.push_back(interleaved(Parts{settled(factors[i].second)}));
    factors_[i].data = low_rank_arrays_.back().data<void>();
  }
  low_rank_.a.data = low_rank_arrays_[0].data<void>();
  low_rank_.a.type = type;
  low_rank_.a.n = a.shape(0);
  low_rank_.a.k = view_.k;
  low_rank_.scales = low_rank_arrays_[1].data<float>();
  low_rank_.factors = factors_.data();
  low_rank_.count = static_cast<int64_t>(factors_.size());
  view_.low_rank = &low_rank_;
}

}  // namespace headrace
