// See weight_arena.h.
#include "weight_arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <optional>

#include "mlx/allocator.h"

namespace headrace {
namespace {

constexpr size_t kHuge = size_t{2} << 20;
constexpr size_t kSlab = size_t{16} << 20;
constexpr size_t kLine = 64;

size_t round_up(size_t n, size_t step) { return (n + step - 1) / step * step; }

// Memory that arrays are cut from. It starts at a huge page's border and is asked for as such before it is touched.
struct Slab {
  mx::array memory;
  char* base;
  size_t size;
  size_t used = 0;

  explicit Slab(size_t bytes) : memory({static_cast<int>(bytes + kHuge)}, mx::uint8, nullptr, {}), size(bytes) {
    memory.set_data(mx::allocator::malloc(memory.nbytes()));
    const auto start = reinterpret_cast<uintptr_t>(memory.data<char>());
    base = reinterpret_cast<char*>(round_up(start, kHuge));
    madvise(base, size, MADV_HUGEPAGE);  // advice: a kernel without huge pages ignores it
  }
};

}  // namespace

mx::array in_huge_pages(const mx::array& a) {
  static std::mutex mutex;
  static auto& current = *new std::optional<Slab>();  // never destroyed: MLX's allocator may be gone before us
  const std::lock_guard lock(mutex);
  const size_t bytes = round_up(a.nbytes(), kLine);
  if (!current.has_value() || current->used + bytes > current->size) {
    current.emplace(std::max(kSlab, round_up(bytes, kHuge)));
  }
  char* to = current->base + current->used;
  current->used += bytes;
  std::memcpy(to, a.data<char>(), a.nbytes());

  mx::array out(a.shape(), a.dtype(), nullptr, {});
  const int64_t offset = to - current->memory.data<char>();
  out.copy_shared_buffer(current->memory, a.strides(), a.flags(), a.data_size(), offset / out.itemsize());
  out.set_status(mx::array::Status::available);
  return out;
}

}  // namespace headrace
