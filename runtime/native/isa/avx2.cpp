// The kernels compiled for avx2. Flags: CMakeLists.txt.
#define HEADRACE_ISA avx2
#define HEADRACE_AVX2 1
#include "table.h"

namespace headrace {

const Kernels& kernels_avx2() { return avx2::kTable; }

}  // namespace headrace
