// Activations of gated units, split among threads (gated.h).
#include "gated.h"

#include <algorithm>

#include "products.h"

namespace headrace {
namespace {

constexpr int64_t kTaskFloats = 1 << 14;  // least numbers per task

}  // namespace

void run_gated(Pool& pool, const Kernels& kernels, const float* gate, const float* up, int64_t n, Act act, float* out) {
  pool.label(Work::weights);
  pool.run(ceil_div(n, kTaskFloats), [&](Tasks& tasks) {
    while (tasks.next()) {
      const int64_t at = tasks.index() * kTaskFloats;
      kernels.gated(gate + at, up == nullptr ? nullptr : up + at, std::min(kTaskFloats, n - at), act, out + at);
    }
  });
}

}  // namespace headrace
