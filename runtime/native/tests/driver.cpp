// Runs everything in core/ and isa/ on every instruction set of this processor: no Python, no MLX. For sanitizer builds
// and for other architectures under an emulator; see sanitize.sh. Arguments: no-fork, best (its best set only).
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "../core/pool.h"
#include "checks.h"

using namespace headrace;

int main(int count, char** arguments) {
  bool forks = true, best_only = false;
  for (int i = 1; i < count; ++i) {
    forks = forks && std::strcmp(arguments[i], "no-fork") != 0;
    best_only = best_only || std::strcmp(arguments[i], "best") == 0;
  }
  tests::test_halves();
  tests::test_pool(forks);
  tests::test_streaming();
  tests::check(!use_kernels("of another processor"), "unknown kernels", "dispatch");
  for (const char* name : {"avx512", "avx2", "neon", "portable", "amx", "amx-emulated"}) {
    if (!use_kernels(name)) continue;
    const Kernels& kernels = best_kernels();
    tests::check(std::strcmp(kernels.name, name) == 0, "the kernels that were asked for", name);
    tests::test_rows(kernels);
    tests::test_projections(kernels);
    tests::test_experts(kernels);
    tests::test_attention(kernels);
    tests::test_packed(kernels);
    tests::test_mixers(kernels);
    tests::test_sampling(kernels);
    std::printf("%s: %s\n", name, tests::failures() == 0 ? "passed" : "FAILED");
    std::fflush(stdout);
    if (best_only) break;
  }
  _exit(tests::failures() == 0 ? 0 : 1);
}
