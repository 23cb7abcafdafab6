// Streaming reads (streaming.h). Plain sums, which any compiler vectorises; the memory is the limit, not the adds.
#include "streaming.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <new>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <vector>

#include "pause.h"

namespace headrace {
namespace {

constexpr std::size_t kStrand = std::size_t{16} << 10;  // adjacent bytes of a stream; the next stream's follow them
constexpr std::size_t kAhead = 1024;                    // prefetch distance in bytes
constexpr std::size_t kHuge = std::size_t{2} << 20;
constexpr std::size_t kLine = 64;
typedef uint64_t Part __attribute__((vector_size(16)));

// The sum of `bytes`, a multiple of Streams strands.
template <int Streams>
uint64_t sum_of(const char* data, std::size_t bytes) {
  Part total[Streams] = {};
  for (std::size_t begin = 0; begin < bytes; begin += Streams * kStrand) {
    for (std::size_t at = begin; at < begin + kStrand; at += kLine) {
#pragma GCC unroll 8
      for (int s = 0; s < Streams; ++s) {
        const char* line = data + at + static_cast<std::size_t>(s) * kStrand;
        Part parts[kLine / sizeof(Part)];
        std::memcpy(parts, line, sizeof parts);
        total[s] += (parts[0] + parts[1]) + (parts[2] + parts[3]);
        // To the L2, like weights. At the end of a strand: the next stream's.
        __builtin_prefetch(line + kAhead, 0, 2);
      }
    }
  }
  uint64_t sum = 0;
  for (const Part& part : total) sum += part[0] + part[1];
  return sum;
}

uint64_t sum_of(const char* data, std::size_t bytes, int streams) {
  switch (streams) {
    case 1: return sum_of<1>(data, bytes);
    case 2: return sum_of<2>(data, bytes);
    case 4: return sum_of<4>(data, bytes);
    default: return sum_of<8>(data, bytes);
  }
}

std::atomic<uint64_t> kept{0};  // so that the reads cannot be optimised away

}  // namespace

StreamingRead::StreamingRead(std::size_t bytes, int threads, int streams) : threads_(threads), streams_(streams) {
  const std::size_t unit = kStrand * static_cast<std::size_t>(std::max(streams, 1));
  if (threads < 1 || (streams != 1 && streams != 2 && streams != 4 && streams != 8)) {
    throw std::invalid_argument("a streaming read has at least one thread, and 1, 2, 4 or 8 streams in each");
  }
  share_ = std::max(unit, bytes / static_cast<std::size_t>(threads) / unit * unit);
  // A huge page more, so that the last bytes are in a whole one, and the last prefetches (kAhead further) find mapped memory.
  mapped_ = this->bytes() + kHuge;
  void* memory = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<char*>(memory);
#if defined(MADV_HUGEPAGE)
  madvise(data_, mapped_, MADV_HUGEPAGE);  // as for weights
#endif
  try {
    // First touch places a share in the memory next to the core that runs this. It is a hope that later passes read it
    // from there: each call starts new threads, and none is bound to a core.
    on_all_threads([this](int thread) { std::memset(data_ + static_cast<std::size_t>(thread) * share_, 1, share_); });
  } catch (...) {
    munmap(data_, mapped_);
    throw;
  }
}

StreamingRead::~StreamingRead() { munmap(data_, mapped_); }

double StreamingRead::pass() {
  using Clock = std::chrono::steady_clock;
  std::vector<Clock::time_point> began(static_cast<std::size_t>(threads_)), ended(began.size());
  on_all_threads([&](int thread) {
    const auto i = static_cast<std::size_t>(thread);
    began[i] = Clock::now();
    kept.fetch_add(sum_of(data_ + i * share_, share_, streams_), std::memory_order_relaxed);
    ended[i] = Clock::now();
  });
  const auto taken = *std::max_element(ended.begin(), ended.end()) - *std::min_element(began.begin(), began.end());
  return std::chrono::duration<double>(taken).count();
}

// Run work(thread) on all threads, started together.
template <class Work>
void StreamingRead::on_all_threads(Work&& work) {
  std::atomic<int> missing{threads_};
  std::atomic<bool> given_up{false};
  const auto begin = [&](int thread) {
    missing.fetch_sub(1);
    while (missing.load() > 0 && !given_up.load()) cpu_pause();
    if (!given_up.load()) work(thread);
  };
  std::vector<std::thread> others;
  try {
    for (int thread = 1; thread < threads_; ++thread) others.emplace_back(begin, thread);
  } catch (const std::system_error&) {
    given_up.store(true);
    for (std::thread& other : others) other.join();
    throw;
  }
  begin(0);
  for (std::thread& other : others) other.join();
}

}  // namespace headrace
