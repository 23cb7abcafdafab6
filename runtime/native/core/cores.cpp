// Default number of threads: physical cores, because two hyperthreads share one core's load ports.
//
// For Linux; the pool is the only caller. runtime/machine/hardware.py counts cores in Python, with tests in
// tests/runtime/machine/test_hardware.py. Of this count runtime/native/tests/pools.cpp checks only that it is at least 1.
#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <set>
#include <string>

#include "pool.h"

namespace headrace {
namespace {

// Every hyperthread of a core lists the same siblings, so counting distinct lists counts cores.
int cores_in(const cpu_set_t& allowed) {
  std::set<std::string> cores;
  int unknown = 0;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed)) continue;
    std::ifstream file("/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list");
    std::string siblings;
    if (std::getline(file, siblings)) {
      cores.insert(siblings);
    } else {
      ++unknown;
    }
  }
  return static_cast<int>(cores.size()) + unknown;
}

// A cgroup v2 CPU quota in whole CPUs, or `otherwise` without one.
int quota(int otherwise) {
  std::ifstream file("/sys/fs/cgroup/cpu.max");
  std::string limit;
  double period = 0;
  if (!(file >> limit >> period) || limit == "max" || period <= 0) return otherwise;
  char* end = nullptr;
  const double used = std::strtod(limit.c_str(), &end);
  return end == limit.c_str() ? otherwise : static_cast<int>(used / period + 0.5);
}

}  // namespace

int physical_cores() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return 1;
  const int cores = cores_in(allowed);
  return std::max(1, std::min(cores, quota(cores)));
}

}  // namespace headrace
