// One instruction that tells the core a spin loop is running. For the waits of pool.cpp, streaming.cpp and bind/peer_primitive.cpp. No
// result depends on it.
#pragma once

namespace headrace {

inline void cpu_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace headrace
