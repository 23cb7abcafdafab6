// The kernels compiled for portable. Flags: CMakeLists.txt.
#define HEADRACE_ISA portable
#define HEADRACE_PORTABLE 1
#include "table.h"

namespace headrace {

const Kernels& kernels_portable() { return portable::kTable; }

}  // namespace headrace
