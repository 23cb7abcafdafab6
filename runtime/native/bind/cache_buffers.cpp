// See cache_buffers.h.
#include "cache_buffers.h"

#include <stdexcept>

#include "matrix_handle.h"
#include "mlx/allocator.h"

namespace headrace {
namespace {

// How many handles on an array exist. MLX keeps this to itself; naming a private member in an explicit instantiation
// is the one way the language allows.
template <auto Member>
struct HandlesOf {
  friend long handles(const mx::array& a) { return (a.*Member).use_count(); }
};
long handles(const mx::array& a);
template struct HandlesOf<&mx::array::array_desc_>;

void require(bool fits, const char* what) {
  if (!fits) throw std::invalid_argument(what);
}

}  // namespace

void require_cache_fits(const AttendCall& plan, const mx::array& keys, const mx::array& values, int batch, int length,
                        int offset) {
  require(keys.ndim() == 4 && keys.shape() == values.shape() && keys.dtype() == values.dtype() &&
              keys.shape(0) == batch && keys.shape(1) == plan.kv_heads && keys.shape(3) == plan.dim,
          "keys and values must be (B, Hkv, capacity, D)");
  require(offset >= 0 && offset + length <= keys.shape(2), "the cache has no room for these tokens");
  type_of(keys.dtype());
}

CacheBuffers::CacheBuffers(const mx::array& keys, const mx::array& values, mx::array& keys_out, mx::array& values_out,
                           size_t outputs)
    : keys_(take_over(keys, keys_out, outputs)),
      values_(take_over(values, values_out, outputs)),
      capacity_(keys.shape(2)),
      type_(type_of(keys.dtype())) {}

void CacheBuffers::describe(AttendCall& call) const {
  call.capacity = capacity_;
  call.kv_type = type_;
  call.keys = keys_.to;
  call.values = values_.to;
}

void CacheBuffers::fill() const {
  for (const Buffer* buffer : {&keys_, &values_}) {
    if (buffer->copy) buffer->from.copy_to(buffer->to);
  }
}

// The input's buffer is taken when no handle on the input is left but those of this node's outputs. MLX's is_donatable()
// would never allow it: each of several outputs holds the inputs, and tasks still queued on this stream (which run before
// ours) hold the buffer.
CacheBuffers::Buffer CacheBuffers::take_over(const mx::array& in, mx::array& out, size_t outputs) {
  const bool ours = in.flags().row_contiguous && handles(in) <= static_cast<long>(outputs);
  if (ours) {
    out.copy_shared_buffer(in);
  } else {
    out.set_data(mx::allocator::malloc(out.nbytes()));
  }
  return {Rows(in), out.data<char>(), !ours};
}

}  // namespace headrace
