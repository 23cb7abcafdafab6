// Reading arrays that are not row-contiguous: broadcast, sliced or transposed inputs. Every node reads its inputs by it.
// Guard: tests/fuzz/targets/kernels.py, with any stride.
#pragma once

#include <cstring>
#include <memory>
#include <vector>

#include "mlx/array.h"

namespace headrace {

namespace mx = mlx::core;

// An input's data in row order. Cheap for contiguous arrays; safe to capture in a task, since MLX keeps the buffer until it ran.
class Rows {
 public:
  explicit Rows(const mx::array& a)
      : data_(a.data<char>()), size_(a.size()), item_(a.itemsize()), contiguous_(a.flags().row_contiguous) {
    if (!contiguous_) {
      shape_.assign(a.shape().begin(), a.shape().end());
      strides_.assign(a.strides().begin(), a.strides().end());
    }
  }

  // The elements in row order: in place, or copied into `copy`.
  template <class T>
  const T* read(std::vector<char>& copy) const {
    if (contiguous_) return reinterpret_cast<const T*>(data_);
    copy.resize(size_ * item_);
    copy_to(copy.data());
    return reinterpret_cast<const T*>(copy.data());
  }

  void copy_to(char* out) const {
    if (contiguous_) {
      std::memcpy(out, data_, size_ * item_);
    } else if (size_ != 0) {
      copy_axis(0, data_, out);
    }
  }

 private:
  // Copy the elements of axes [axis, ...) at `from` in row order; returns the end of what was written. Strides are in elements.
  char* copy_axis(size_t axis, const char* from, char* out) const {
    if (axis == shape_.size()) {
      std::memcpy(out, from, item_);
      return out + item_;
    }
    if (axis + 1 == shape_.size() && strides_[axis] == 1) {
      const size_t bytes = static_cast<size_t>(shape_[axis]) * item_;
      std::memcpy(out, from, bytes);
      return out + bytes;
    }
    for (int64_t i = 0; i < shape_[axis]; ++i) {
      out = copy_axis(axis + 1, from + i * strides_[axis] * static_cast<int64_t>(item_), out);
    }
    return out;
  }

  const char* data_;
  size_t size_;
  size_t item_;
  bool contiguous_;
  std::vector<int64_t> shape_, strides_;
};

}  // namespace headrace
