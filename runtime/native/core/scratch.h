// Per-thread scratch memory, kept between calls, so that kernels' rows and scores are not allocated in each step.
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

// Slots of a thread's memory, and their users; a slot belongs to one kernel at a time. "layer" is
// bind/layer_primitive.cpp, the other files are in core/.
enum class Slot {
  shared_rows,   // linear, experts: prepared rows, for all threads; attend: queries
  rows,          // linear, experts: one normalized row; experts: a router's scores; attend: a key and a value
  panel,         // linear: one prepared row, or some for a low-rank product; experts: prepared rows of an expert's tokens;
                 // attend_prefill, attend_rounded: keys and values
  tile,          // experts: those rows for `up`; attend: heads normalized together; attend_prefill: sums;
                 // attend_rounded: queries and states of one tile
  scores,        // attend_decode, attend_prefill: scores; mixer: memory of a head's task
  states,        // attend_decode, attend_prefill: softmax states; attend_rounded: queries and states of all tiles
  output,        // linear, experts: products of a task
  wide,          // layer: rows between qkv and attention, then between gate_up and down
  heads,         // layer: rows between attention or the mixer and its output projection
  logits,        // sample: logits; experts: a router's logits; layer: gates of `down`
  routing,       // experts: Routing
  inner,         // experts: rows between up and down; indices of pairs
  products,      // experts: products of `down` with several tokens
  other_rows,    // experts: prepared rows for `up`, if those for `gate` do not suit it
  weights,       // sample: weights of all tokens
  unpacked,      // attend.h: packed keys and values as floats
  cut_logits,    // sample: logits around a cut
  cut_weights,   // sample: their weights
  mixed,         // mixer: rows of the convolution; layer: gates of attention
  beside,        // layer: rows between `mixer_in` and a mixer next to attention
  beside_heads,  // layer: rows between that mixer and `mixer_out`
  branch,        // layer: rows to normalize before they are added
  other_branch,  // layer: results of experts
  own_input,     // layer: rows between `own_gate` and `own_projection`
  low_rank,      // linear: first products of low-rank ones
  received,      // bind/peer_primitive.cpp: rows of the other rank
  kCount
};

inline float* scratch(Slot slot, int64_t n) {
  static thread_local Scratch slots[static_cast<int>(Slot::kCount)];
  return slots[static_cast<int>(slot)].floats(n);
}

}  // namespace headrace
