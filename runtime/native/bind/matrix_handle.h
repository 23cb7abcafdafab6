// A projection's arrays, evaluated and contiguous, alive as long as any graph node needs them.
//
// Guard: tests/runtime/ops/test_native_weights.py (layout, memory), test_native_kernels.py (formats) and test_native_lifetime.py.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../core/kernels.h"
#include "mlx/array.h"

namespace headrace {

namespace mx = mlx::core;

Type type_of(mx::Dtype dtype);  // throws std::invalid_argument for anything but the three float types

// `a` evaluated and row-contiguous.
mx::array settled(const mx::array& a);

// Shared by graph nodes and Python through its own control block: a node freed on the stream's thread must not take the interpreter
// lock, whose holder may wait for that stream.
class MatrixHandle : public std::enable_shared_from_this<MatrixHandle> {
 public:
  // Arrays of runtime.ops.weights.Weight, not read before fill(). Throws std::invalid_argument for inconsistent or unsupported shapes or
  // types.
  MatrixHandle(const mx::array& data, const std::optional<mx::array>& scales,
               const std::optional<mx::array>& offsets, const std::optional<mx::array>& bias, int bits, int group,
               const std::string& mode, bool exact);

  // Evaluates the arrays, on the thread that made them, and moves them. Before any use but of sizes.
  void fill();

  // Adds low-rank products: those of B (rows, rank) go to its rows from a first one on, and the ranks of all factors follow one another
  // in A (R, K) and `scales` (R). Once, before the first use of the view.
  void add_low_rank(const mx::array& a, const mx::array& scales, const std::vector<std::pair<int, mx::array>>& factors);

  // The arrays of low-rank products in the kernels' memory.
  const std::vector<mx::array>& low_rank_arrays() const { return low_rank_arrays_; }

  // Whether the view has the data.
  bool filled() const { return data_.has_value(); }

  const Matrix& view() const { return view_; }

  // The arrays in the kernels' memory, interleaved if the view rounds() (core/interleaved.h), then without offsets if it is symmetric();
  // the caller may free its own.
  const mx::array& data() const { return data_.value(); }
  const std::optional<mx::array>& scales() const { return scales_; }
  const std::optional<mx::array>& offsets() const { return offsets_; }
  const std::optional<mx::array>& bias() const { return bias_; }

 private:
  struct Sources {
    mx::array data;
    std::optional<mx::array> scales, offsets, bias;
  };

  Matrix view_;
  std::optional<Sources> sources_;  // until fill()
  std::optional<mx::array> data_, scales_, offsets_, bias_;
  LowRank low_rank_;
  std::vector<Factor> factors_;  // of low_rank_
  std::vector<mx::array> low_rank_arrays_;
};

}  // namespace headrace
