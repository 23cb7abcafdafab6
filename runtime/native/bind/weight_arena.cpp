// Slabs of huge pages for weights, and aligned memory for caches (weight_arena.h).
#include "weight_arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <mutex>
#include <new>
#include <stdexcept>
#include <vector>

namespace headrace {
namespace {

constexpr size_t kHuge = size_t{2} << 20;
constexpr size_t kSlab = size_t{32} << 20;
constexpr size_t kOpen = 8;  // most slabs considered for new arrays
constexpr size_t kLine = 64;

size_t round_up(size_t n, size_t step) { return (n + step - 1) / step * step; }

// Memory for several arrays, aligned to a huge page and advised before its first use.
struct Slab {
  mx::array memory;
  char* base;
  size_t size;
  size_t used = 0;

  explicit Slab(size_t bytes)  // two dimensions, since one is limited to 2 GiB
      : memory({static_cast<int>(bytes / kHuge) + 1, static_cast<int>(kHuge)}, mx::uint8, nullptr, {}), size(bytes) {
    memory.set_data(allocated(memory.nbytes()));
    const auto start = reinterpret_cast<uintptr_t>(memory.data<char>());
    base = reinterpret_cast<char*>(round_up(start, kHuge));
    madvise(base, size, MADV_HUGEPAGE);  // ignored by kernels without huge pages
  }
};

// Slabs considered for new arrays, and the lock around them.
struct Arena {
  std::mutex mutex;
  std::vector<Slab> open;
};

Arena& arena() {
  static auto& only = *new Arena();  // never destroyed: MLX's allocator may be destroyed first
  return only;
}

// Frees the slabs whose arrays are all freed.
void free_unused(std::vector<Slab>& open) {
  std::erase_if(open, [](const Slab& slab) { return slab.memory.data_shared_ptr().use_count() == 1; });
}

// First fit for `bytes` in the open slabs, so that scales fill gaps of large arrays.
Slab& slab_for(size_t bytes, std::vector<Slab>& open) {
  free_unused(open);
  for (Slab& slab : open) {
    if (slab.size - slab.used >= bytes) return slab;
  }
  if (open.size() == kOpen) {
    open.erase(std::min_element(open.begin(), open.end(), [](const Slab& a, const Slab& b) {
      return a.size - a.used < b.size - b.used;
    }));
  }
  return open.emplace_back(std::max(kSlab, round_up(bytes, kHuge)));
}

// An array at address `to` in `memory`.
mx::array array_at(const mx::array& memory, char* to, const mx::Shape& shape, mx::Dtype dtype) {
  mx::array out(shape, dtype, nullptr, {});
  mx::Strides strides(shape.size(), 1);
  for (size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * shape[i];
  const mx::array::Flags flags{.contiguous = true, .row_contiguous = true, .col_contiguous = false};
  const int64_t offset = to - memory.data<char>();
  out.copy_shared_buffer(memory, strides, flags, out.size(), offset / static_cast<int64_t>(out.itemsize()));
  out.set_status(mx::array::Status::available);
  return out;
}

// Cache lines of an array. MLX itself checks neither signs nor overflow.
size_t lines_of(const mx::Shape& shape, mx::Dtype dtype) {
  const size_t most = (size_t{std::numeric_limits<int>::max()} - 1) * kLine;
  size_t bytes = dtype.size();
  for (const int size : shape) {
    if (size < 0) throw std::invalid_argument("an array has a negative size");
    if (size > 0 && bytes > most / static_cast<size_t>(size)) throw std::invalid_argument("an array is too large");
    bytes *= static_cast<size_t>(size);
  }
  return round_up(bytes, kLine) / kLine;
}

}  // namespace

mx::allocator::Data allocated(size_t bytes) {
  mx::allocator::Data memory = mx::allocator::malloc(bytes);
  if (memory.buffer().ptr() == nullptr && bytes != 0) throw std::bad_alloc();
  return memory;
}

mx::array in_huge_pages(const mx::Shape& shape, mx::Dtype dtype) {
  const std::lock_guard lock(arena().mutex);
  const size_t bytes = lines_of(shape, dtype) * kLine;
  Slab& slab = slab_for(bytes, arena().open);
  char* to = slab.base + slab.used;
  slab.used += bytes;
  return array_at(slab.memory, to, shape, dtype);
}

void free_unused_slabs() {
  const std::lock_guard lock(arena().mutex);
  free_unused(arena().open);
}

mx::array zeros_on_lines(const mx::Shape& shape, mx::Dtype dtype) {
  const size_t lines = lines_of(shape, dtype);
  mx::array memory({static_cast<int>(lines) + 1, static_cast<int>(kLine)}, mx::uint8, nullptr, {});
  memory.set_data(allocated(memory.nbytes()));
  const auto start = round_up(reinterpret_cast<uintptr_t>(memory.data<char>()), kLine);
  auto* to = reinterpret_cast<char*>(start);
  const size_t first = round_up(start, kHuge), last = (start + lines * kLine) / kHuge * kHuge;
  if (first < last) madvise(reinterpret_cast<char*>(first), last - first, MADV_HUGEPAGE);
  std::memset(to, 0, lines * kLine);
  return array_at(memory, to, shape, dtype);
}

mx::array in_huge_pages(const mx::array& a) {
  mx::array out = in_huge_pages(a.shape(), a.dtype());
  std::memcpy(out.data<char>(), a.data<char>(), a.nbytes());
  return out;
}

}  // namespace headrace
