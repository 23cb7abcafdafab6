// The kernels compiled for avx512. Flags: CMakeLists.txt.
#define HEADRACE_ISA avx512
#define HEADRACE_AVX512 1
#include "table.h"

namespace headrace {

const Kernels& kernels_avx512() { return avx512::kTable; }

}  // namespace headrace
