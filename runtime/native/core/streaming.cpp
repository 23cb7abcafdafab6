// See streaming.h. Plain 64-byte-wide sums, which any compiler vectorises; the memory is the limit, not the adds.
#include "streaming.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <limits>

namespace headrace {
namespace {

constexpr std::size_t kTaskBytes = std::size_t{1} << 20;
typedef uint64_t Line __attribute__((vector_size(64)));

uint64_t sum_of(const char* data, std::size_t bytes) {
  Line total[4] = {};
  for (; bytes >= sizeof total; bytes -= sizeof total, data += sizeof total) {
    Line lines[4];
    std::memcpy(lines, data, sizeof lines);  // the buffer need not be aligned
    for (int i = 0; i < 4; ++i) total[i] += lines[i];
  }
  const Line all = (total[0] + total[1]) + (total[2] + total[3]);
  uint64_t sum = 0;
  for (int i = 0; i < 8; ++i) sum += all[i];
  return sum;
}

}  // namespace

double streaming_read_seconds(Pool& pool, const void* data, std::size_t bytes, int passes) {
  std::atomic<uint64_t> kept{0};  // so that the reads cannot be optimised away
  double best = std::numeric_limits<double>::infinity();
  for (int pass = 0; pass < std::max(1, passes); ++pass) {
    const auto start = std::chrono::steady_clock::now();
    pool.run(static_cast<int64_t>((bytes + kTaskBytes - 1) / kTaskBytes), [&](Tasks& tasks) {
      uint64_t sum = 0;
      while (tasks.next()) {
        const std::size_t at = static_cast<std::size_t>(tasks.index()) * kTaskBytes;
        sum += sum_of(static_cast<const char*>(data) + at, std::min(kTaskBytes, bytes - at));
        kept.fetch_add(sum, std::memory_order_relaxed);
      }
    });
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    best = std::min(best, taken.count());
  }
  return best;
}

}  // namespace headrace
