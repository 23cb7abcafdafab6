// See cache_buffers.h.
#include "cache_buffers.h"

#include <stdexcept>

#include "matrix_handle.h"

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

}  // namespace headrace
