// The pool under stress: several callers, a changing number of threads, sleeping workers, a fork, the end of a process.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <thread>

#include "../core/pool.h"
#include "../core/scratch.h"
#include "../core/streaming.h"
#include "checks.h"

namespace headrace::tests {
namespace {

// Every task runs once, whoever else uses the pool.
void count_regions(int regions) {
  for (int i = 0; i < regions; ++i) {
    std::vector<int> done(static_cast<size_t>(i % 50), 0);
    auto body = [&](Tasks& tasks) {
      while (tasks.next()) {
        scratch(Slot::panel, 64 + tasks.index() * 100)[63] = 1;
        ++done[static_cast<size_t>(tasks.index())];
      }
    };
    Pool::shared().run(static_cast<int64_t>(done.size()), body, i % 7 != 0);
    for (const int times : done) check(times == 1, "a task ran other than once", "pool");
  }
}

// Runs body in a child; whether it ended as `expected`.
template <class Body>
bool child_ends_well(Body&& body) {
  const pid_t child = fork();
  if (child == 0) {
    body();
    _exit(1);
  }
  int status = 1;
  waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace

void test_pool(bool forks) {
  Pool& pool = Pool::shared();
  check(physical_cores() >= 1, "at least one core", "pool");
  pool.set_threads(4);
  std::thread one(count_regions, 700), other(count_regions, 700);
  for (const int threads : {1, 3, 0, 4, 2, 4}) {  // while others are at it
    pool.set_threads(threads);
    count_regions(100);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // long enough for workers to sleep
  }
  one.join();
  other.join();
  pool.set_threads(100000);
  check(pool.threads() <= 256, "a bounded number of threads", "pool");
  pool.set_threads(4);
  if (!forks) return;
  const bool works = child_ends_well([] {
    count_regions(200);
    _exit(failures() == 0 ? 0 : 1);
  });
  check(works, "work after a fork", "pool");
  const bool leaves = child_ends_well([] {
    for (int i = 0; i < 2; ++i) {
      std::thread([] {
        for (;;) count_regions(1000);
      }).detach();
    }
    count_regions(50);
    std::exit(0);  // while regions run: destructors and all
  });
  check(leaves, "exit while regions run", "pool");
}

void test_streaming() {
  for (const int streams : {1, 2, 4, 8}) {
    for (const int threads : {1, 3}) {
      for (const size_t bytes : {size_t{0}, size_t{1}, (size_t{3} << 20) + 2}) {
        StreamingRead read(bytes, threads, streams);
        check(read.bytes() > 0 && read.bytes() <= std::max(bytes, static_cast<size_t>(threads * streams) << 14), "bytes", "streaming");
        const double seconds = read.pass();
        check(seconds > 0 && seconds < 60, "seconds", "streaming");
      }
    }
  }
}

}  // namespace headrace::tests
