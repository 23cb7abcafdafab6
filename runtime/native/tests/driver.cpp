// Runs everything in core/ and isa/ on every instruction set of this processor: no Python, no MLX. For sanitizer builds
// and for other architectures under an emulator; see sanitize.sh. Arguments: no-fork; best (its best set only) or the
// name of a set.
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "../core/pool.h"
#include "checks.h"

using namespace headrace;

int main(int count, char** arguments) {
  bool forks = true, best_only = false;
  const char* only = nullptr;
  for (int i = 1; i < count; ++i) {
    if (std::strcmp(arguments[i], "no-fork") == 0) {
      forks = false;
    } else if (std::strcmp(arguments[i], "best") == 0) {
      best_only = true;
    } else {
      only = arguments[i];
    }
  }
  tests::test_halves();
  tests::test_pool(forks);
  tests::test_streaming();
  tests::test_interleaving();
  tests::test_blocks();
  bool tested = false;
  tests::check(!use_kernels("of another processor"), "unknown kernels", "dispatch");
  for (const char* name : {"avx512", "avx2", "neon", "portable", "amx", "amx-emulated"}) {
    if ((only != nullptr && std::strcmp(only, name) != 0) || !use_kernels(name)) continue;
    tested = true;
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
  tests::check(tested, "a set of this processor", only == nullptr ? "any" : only);
  _exit(tests::failures() == 0 ? 0 : 1);
}
