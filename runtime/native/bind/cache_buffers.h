// The K/V buffers of a node that appends to a cache: its inputs' own memory where nobody else holds it, else a copy.
#pragma once

#include <cstdint>
#include <vector>

#include "../core/attend.h"
#include "mlx/array.h"
#include "strided.h"

namespace headrace {

namespace mx = mlx::core;

// Throws std::invalid_argument unless keys and values (B, Hkv, capacity, D) suit the plan and have room for `length` more
// entries at `offset`.
void require_cache_fits(const AttendCall& plan, const mx::array& keys, const mx::array& values, int batch, int length,
                        int offset);

class CacheBuffers {
 public:
  // Gives keys_out and values_out, two of the node's `outputs` arrays, their memory. To be made in eval_cpu.
  CacheBuffers(const mx::array& keys, const mx::array& values, mx::array& keys_out, mx::array& values_out,
               size_t outputs);

  // Where the buffers are and how they are stored.
  void describe(AttendCall& call) const;
  // Copies what had to be copied. To be called in the task, before anything is appended.
  void fill() const;

 private:
  struct Buffer {
    Rows from;
    char* to;
    bool copy;
  };
  static Buffer take_over(const mx::array& in, mx::array& out, size_t outputs);

  Buffer keys_, values_;
  int64_t capacity_;
  Type type_;
};

}  // namespace headrace
