// Selection of the kernels for this processor, once at run time.
#include <atomic>
#include <cstring>

#include "kernels.h"

namespace headrace {

#if defined(__x86_64__)
const Kernels& kernels_avx512();
const Kernels& kernels_avx2();
#endif
const Kernels& kernels_portable();

namespace {

// The compiler's check includes the operating system's support of the registers.
bool can_run(const Kernels& kernels) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (&kernels == &kernels_avx512()) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx2") &&
           __builtin_cpu_supports("fma");
  }
  if (&kernels == &kernels_avx2()) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  }
#endif
  return &kernels == &kernels_portable();
}

// In order of preference.
const Kernels* const kFastestFirst[] = {
#if defined(__x86_64__)
    &kernels_avx512(),
    &kernels_avx2(),
#endif
    &kernels_portable(),
};

const Kernels* fastest() {
  for (const Kernels* kernels : kFastestFirst) {
    if (can_run(*kernels)) return kernels;
  }
  return &kernels_portable();
}

std::atomic<const Kernels*>& in_use() {
  static std::atomic<const Kernels*> kernels{fastest()};
  return kernels;
}

}  // namespace

const Kernels& best_kernels() { return *in_use().load(std::memory_order_relaxed); }

bool use_kernels(const char* name) {
  for (const Kernels* kernels : kFastestFirst) {
    if (std::strcmp(kernels->name, name) != 0 || !can_run(*kernels)) continue;
    in_use().store(kernels, std::memory_order_relaxed);
    return true;
  }
  return false;
}

}  // namespace headrace
