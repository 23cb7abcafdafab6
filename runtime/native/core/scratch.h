// Per-thread working memory that grows and stays: a decode step allocates nothing.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

namespace headrace {

class Scratch {
 public:
  ~Scratch() { std::free(data_); }

  // At least `n` floats, 64-byte aligned, contents undefined. Invalidates what this slot gave out before.
  float* floats(int64_t n) {
    if (n > size_) grow(n);
    return data_;
  }

 private:
  void grow(int64_t n) {
    std::free(data_);
    data_ = nullptr;
    size_ = 0;
    const int64_t rounded = (n + n / 4 + 1023) / 1024 * 1024;
    data_ = static_cast<float*>(std::aligned_alloc(64, static_cast<size_t>(rounded) * sizeof(float)));
    if (data_ == nullptr) throw std::bad_alloc();
    size_ = rounded;
  }

  float* data_ = nullptr;
  int64_t size_ = 0;
};

// Distinct purposes within one thread; a slot's memory belongs to one kernel at a time.
enum class Slot { shared_rows, rows, panel, tile, scores, states, output, kCount };

inline float* scratch(Slot slot, int64_t n) {
  static thread_local Scratch slots[static_cast<int>(Slot::kCount)];
  return slots[static_cast<int>(slot)].floats(n);
}

}  // namespace headrace
