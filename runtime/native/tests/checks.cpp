// See checks.h.
#include "checks.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <utility>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(begin, size)
#define ASAN_UNPOISON_MEMORY_REGION(begin, size)
#endif

namespace headrace::tests {
namespace {

std::atomic<int> failed{0};  // pool tests count from several threads
std::mt19937 random_bits(7);

}  // namespace

void check(bool holds, const char* what, const char* where) {
  if (!holds && failed++ < 20) std::fprintf(stderr, "FAILED: %s (%s)\n", what, where);
}

int failures() { return failed; }

Guarded::Guarded(int64_t bytes) {
  const int64_t page = sysconf(_SC_PAGESIZE);
  const int64_t usable = (bytes + page - 1) / page * page;
  mapped_ = usable + page;
  void* pages = mmap(nullptr, static_cast<size_t>(mapped_), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) std::abort();
  pages_ = static_cast<char*>(pages);
  begin_ = pages_ + usable - bytes;
  if (mprotect(pages_ + usable, static_cast<size_t>(page), PROT_NONE) != 0) std::abort();
  ASAN_POISON_MEMORY_REGION(pages_, static_cast<size_t>(usable - bytes));
}

Guarded::Guarded(Guarded&& other) noexcept
    : pages_(std::exchange(other.pages_, nullptr)), mapped_(other.mapped_), begin_(other.begin_) {}

Guarded::~Guarded() {
  if (pages_ == nullptr) return;
  ASAN_UNPOISON_MEMORY_REGION(pages_, static_cast<size_t>(begin_ - pages_));
  munmap(pages_, static_cast<size_t>(mapped_));
}

Guarded guarded(const std::vector<float>& values) { return stored(values, Type::f32); }

Guarded stored(const std::vector<float>& values, Type type) {
  Guarded out(static_cast<int64_t>(values.size()) * size_of(type));
  for (size_t i = 0; i < values.size(); ++i) {
    if (type == Type::f32) out.as<float>()[i] = values[i];
    else out.as<uint16_t>()[i] = type == Type::f16 ? f32_to_f16(values[i]) : f32_to_bf16(values[i]);
  }
  return out;
}

Guarded random_bytes(int64_t n) {
  Guarded out(n);
  for (int64_t i = 0; i < n; ++i) out.as<char>()[i] = static_cast<char>(random_bits());
  return out;
}

std::vector<float> random_floats(int64_t n) {
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(n));
  for (float& v : values) v = normal(random_bits);
  return values;
}

float number(const void* stored, Type type, int64_t i) {
  if (type == Type::f32) return load_scalar<Type::f32>(stored, i);
  if (type == Type::e8m0 || type == Type::e4m3) {
    const int byte = static_cast<const uint8_t*>(stored)[i];
    if (type == Type::e8m0) return std::ldexp(1.0f, byte - 127);
    const int exponent = byte >> 3 & 15, fraction = byte & 7;
    const float size = std::ldexp(exponent == 0 ? fraction : fraction + 8.0f, std::max(exponent, 1) - 10);
    return (byte & 0x80) != 0 ? -size : size;
  }
  return type == Type::f16 ? load_scalar<Type::f16>(stored, i) : load_scalar<Type::bf16>(stored, i);
}

}  // namespace headrace::tests
