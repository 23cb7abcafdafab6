// Which kernels this processor can run, asked once at run time.
#include <cstring>

#include "kernels.h"

namespace headrace {

#if defined(__x86_64__)
const Kernels& kernels_avx512();
const Kernels& kernels_avx2();
#endif
const Kernels& kernels_portable();

namespace {

// The compiler's check also asks the operating system whether it saves the registers.
bool can_run(const Kernels& kernels) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (&kernels == &kernels_avx512()) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  }
  if (&kernels == &kernels_avx2()) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  }
#endif
  return &kernels == &kernels_portable();
}

const Kernels* const kFastestFirst[] = {
#if defined(__x86_64__)
    &kernels_avx512(),
    &kernels_avx2(),
#endif
    &kernels_portable(),
};

}  // namespace

const Kernels* find_kernels(const char* name) {
  for (const Kernels* kernels : kFastestFirst) {
    if (std::strcmp(kernels->name, name) == 0) return can_run(*kernels) ? kernels : nullptr;
  }
  return nullptr;
}

const Kernels& best_kernels() {
  static const Kernels* best = [] {
    for (const Kernels* kernels : kFastestFirst) {
      if (can_run(*kernels)) return kernels;
    }
    return &kernels_portable();
  }();
  return *best;
}

}  // namespace headrace
