// Selection of the kernels for this processor, once at run time, among those that were compiled (CMakeLists.txt).
//
// A new set of kernels needs a namespace of isa/table.cpp (CMakeLists.txt), a row of `fastest_first`, and a test of the processor
// (processor.h). Guard: tests/runtime/ops/test_native_widths.py chooses sets by name; runtime/native/tests/driver.cpp runs all that the
// processor has.
#include <atomic>
#include <cstring>

#include "kernels.h"
#include "processor.h"

namespace headrace {

#if defined(HEADRACE_WITH_AVX512)
namespace avx512 {
const Kernels& kernels();
const Kernels& amx_kernels();
const Kernels& emulated_kernels();
}  // namespace avx512
#endif
#if defined(HEADRACE_WITH_AVX2)
namespace avx2 { const Kernels& kernels(); }
#endif
#if defined(HEADRACE_WITH_PORTABLE)
namespace portable { const Kernels& kernels(); }
#endif

namespace {

struct Compiled {
  const Kernels* kernels;
  bool (*runs)();  // on this processor
};

// The fastest kernels of a name, or of any name (nullptr), that run here; nullptr if there are none. Tiles, last, only by name: their
// speed was not measured.
const Kernels* find(const char* name) {
  const Compiled fastest_first[] = {
#if defined(HEADRACE_WITH_AVX512)
      {&avx512::kernels(), has_avx512},
#endif
#if defined(HEADRACE_WITH_AVX2)
      {&avx2::kernels(), has_avx2},
#endif
#if defined(HEADRACE_WITH_PORTABLE)
      {&portable::kernels(), [] { return true; }},
#endif
#if defined(HEADRACE_WITH_AVX512)
      {&avx512::amx_kernels(), has_amx},
      {&avx512::emulated_kernels(), has_avx512},
#endif
  };
  for (const auto& [kernels, runs] : fastest_first) {
    if (name == nullptr ? kernels->multiply_tiles == nullptr && runs() : std::strcmp(kernels->name, name) == 0 && runs()) return kernels;
  }
  return nullptr;
}

std::atomic<const Kernels*>& in_use() {
  static std::atomic<const Kernels*> kernels{find(nullptr)};
  return kernels;
}

}  // namespace

bool have_kernels() { return in_use().load(std::memory_order_relaxed) != nullptr; }

const Kernels& best_kernels() { return *in_use().load(std::memory_order_relaxed); }

bool use_kernels(const char* name) {
  const Kernels* kernels = find(name);
  if (kernels != nullptr) in_use().store(kernels, std::memory_order_relaxed);
  return kernels != nullptr;
}

}  // namespace headrace
