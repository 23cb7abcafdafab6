// Per-thread scratch memory, kept between calls, so that a decode step allocates nothing.
//
// Guard: builds for the address sanitizer give exact sizes (runtime/native/tests/sanitize.sh); pools.cpp uses it from many threads.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

namespace headrace {

class Scratch {
 public:
  ~Scratch() { std::free(data_); }

  // At least `n` floats, 64-byte aligned, contents undefined. Invalidates the slot's previous memory.
  float* floats(int64_t n) {
    if (n > size_ || kExact) grow(n);
    return data_;
  }

 private:
  void grow(int64_t n) {
    std::free(data_);
    data_ = nullptr;
    size_ = 0;
    const int64_t rounded = kExact ? n : (n + n / 4 + 1023) / 1024 * 1024;
    void* data = nullptr;
    if (posix_memalign(&data, 64, static_cast<size_t>(rounded) * sizeof(float)) != 0) throw std::bad_alloc();
    data_ = static_cast<float*>(data);
    size_ = rounded;
  }

#if defined(__SANITIZE_ADDRESS__)  // shows any use beyond n, and any after the slot gave out other memory
  static constexpr bool kExact = true;
#else
  static constexpr bool kExact = false;
#endif

  float* data_ = nullptr;
  int64_t size_ = 0;
};

// Slots of a thread's memory; a slot belongs to one kernel at a time.
enum class Slot {
  shared_rows, rows, panel, tile, scores, states, output, wide, heads, logits, routing, inner, products, other_rows,
  weights, unpacked, cut_logits, cut_weights, mixed, beside,
  beside_heads, branch, other_branch, own_input, received, kCount
};

inline float* scratch(Slot slot, int64_t n) {
  static thread_local Scratch slots[static_cast<int>(Slot::kCount)];
  return slots[static_cast<int>(slot)].floats(n);
}

}  // namespace headrace
