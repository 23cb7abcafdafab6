// Instruction sets of this processor, if the operating system supports their registers. A set that is wrongly reported
// ends the process by an illegal instruction. Guard: runtime/native/tests/driver.cpp runs every set that is reported.
//
// Callers: dispatch.cpp, at run time, and CMakeLists.txt, which compiles and runs `has_avx512` and `has_avx2` by name
// to choose the sets to build for this machine. After a rename the check fails without an error: the set is not built.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace headrace {

#if defined(__x86_64__)

inline bool has_avx2() {  // and what its kernels are compiled with besides
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
         __builtin_cpu_supports("bmi2");
}

inline bool has_avx512() {  // F, BW, DQ, VL and VNNI, above AVX2
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
}

// Tiles of bfloat16 numbers. Asks the system to let the process use them. Bits are those of CPUID leaf 7, register EDX.
inline bool has_amx() {
  constexpr unsigned kTile = 1u << 24, kBfloat16 = 1u << 22;
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM of arch_prctl, and the state it asks for
  unsigned a = 0, b = 0, c = 0, d = 0;
  return has_avx512() && __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & kTile) != 0 && (d & kBfloat16) != 0 &&
         syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

#endif

}  // namespace headrace
