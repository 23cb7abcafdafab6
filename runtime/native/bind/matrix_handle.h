// A projection's arrays, evaluated, contiguous and held for as long as any graph node needs them.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "../core/kernels.h"
#include "mlx/array.h"

namespace headrace {

namespace mx = mlx::core;

Type type_of(mx::Dtype dtype);  // throws std::invalid_argument for anything but the three float types

// `a` evaluated and row-contiguous.
mx::array settled(const mx::array& a);

// Graph nodes share it with Python through its own control block: a node that dies on the stream's thread must not need
// the interpreter lock, which another thread may hold while it waits for that very stream.
class MatrixHandle : public std::enable_shared_from_this<MatrixHandle> {
 public:
  // Arrays as runtime.ops.weights.Weight holds them. Throws std::invalid_argument for shapes or types that do not
  // fit together, or that the kernels do not know.
  MatrixHandle(const mx::array& data, const std::optional<mx::array>& scales,
               const std::optional<mx::array>& offsets, const std::optional<mx::array>& bias, int bits, int group,
               const std::string& mode, bool exact);

  const Matrix& view() const { return view_; }

  // The arrays as they are held, moved to where the kernels like them (and interleaved, see core/interleaved.h, where the view
  // rounds()); the caller may let go of its own.
  const mx::array& data() const { return *data_; }
  const std::optional<mx::array>& scales() const { return scales_; }
  const std::optional<mx::array>& offsets() const { return offsets_; }
  const std::optional<mx::array>& bias() const { return bias_; }

 private:
  Matrix view_;
  std::optional<mx::array> data_, scales_, offsets_, bias_;
};

}  // namespace headrace
