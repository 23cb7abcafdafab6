// Activations of gated units. Guard: tests/runtime/ops/test_native_recurrent.py; the kernel itself: runtime/native/tests/rows.cpp.
#pragma once

#include "kernels.h"
#include "pool.h"

namespace headrace {

// out = act(gate) * up over n values; act(gate) without up.
void run_gated(Pool& pool, const Kernels& kernels, const float* gate, const float* up, int64_t n, Act act, float* out);

}  // namespace headrace
