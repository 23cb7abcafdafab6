// See cache_buffers.h.
#include "cache_buffers.h"

#include <cstring>
#include <stdexcept>

#include "matrix_handle.h"
#include "weight_arena.h"

namespace headrace {
namespace {

void require(bool fits, const char* what) {
  if (!fits) throw std::invalid_argument(what);
}

}  // namespace

CacheBuffers::CacheBuffers(const mx::array& keys, const mx::array& values, const AttendCall& plan, int batch,
                           int length, int offset, int first)
    : keys_(keys), values_(values), first_(first) {
  require(keys.ndim() == 4 && keys.shape() == values.shape() && keys.dtype() == values.dtype() &&
              keys.shape(0) == batch && keys.shape(1) == plan.kv_heads && keys.shape(3) == plan.dim,
          "keys and values must be (B, Hkv, capacity, D)");
  require(first >= 0 && offset >= first && offset - first + length <= keys.shape(2),
          "the cache has no room for these tokens");
  AttendCall call;
  call.window = plan.window;
  require(first <= first_seen(call, offset), "the cache has dropped what these tokens see");
  type_of(keys.dtype());
  for (mx::array* buffer : {&keys_, &values_}) {
    if (!buffer->is_available()) buffer->eval();
    require(buffer->flags().row_contiguous, "keys and values must be row-contiguous");
  }
}

void CacheBuffers::describe(AttendCall& call) const {
  call.capacity = keys_.shape(2);
  call.first = first_;
  call.kv_type = type_of(keys_.dtype());
  call.keys = const_cast<void*>(keys_.data<void>());
  call.values = const_cast<void*>(values_.data<void>());
}

mx::array grow_buffer(const mx::array& buffer, int capacity) {
  require(buffer.ndim() == 4 && buffer.shape(2) <= capacity, "a buffer must be (B, Hkv, entries, D), and no longer than asked for");
  mx::array from = buffer;
  from.eval();
  // A slice of entries is read where it lies.
  if (from.strides(3) != 1 || from.strides(2) != from.shape(3)) from = settled(from);
  mx::Shape shape = from.shape();
  shape[2] = capacity;
  mx::array out = zeros_on_lines(shape, from.dtype());
  if (from.size() == 0) return out;
  const auto item = static_cast<int64_t>(from.itemsize()), row = item * shape[3];
  char* to = out.data<char>();
  for (int64_t b = 0; b < shape[0]; ++b) {
    for (int64_t h = 0; h < shape[1]; ++h, to += row * capacity) {
      const char* head = from.data<char>() + (b * from.strides(0) + h * from.strides(1)) * item;
      std::memcpy(to, head, static_cast<size_t>(row * from.shape(2)));
    }
  }
  return out;
}

}  // namespace headrace
