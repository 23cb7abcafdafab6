// The thread pool, for hundreds of parallel regions of a few microseconds per decode step.
//
// Contract: run(tasks, body) distributes tasks [0, tasks) over the calling thread and the workers and returns when all are done.
// Each thread takes from the front of its own range, so that its tasks are adjacent in memory, then from the back of others'. Late or
// preempted workers delay a region only if they hold a task. If the pool is busy (a second engine), a region runs on its caller
// alone. Between regions workers spin a few microseconds, then yield, then sleep. Workers are never joined; a forked child makes its
// own.
//
// Guard: runtime/native/tests/pools.cpp, also under the thread sanitizer (sanitize.sh); tests/runtime/ops/test_native_process.py.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <type_traits>

namespace headrace {

class Pool;

// Kinds of regions, for measurements.
enum class Work : uint8_t { weights, attention, sampling, kCount };

// Nanoseconds of all regions of one kind: total, the caller's wait for tasks of others, and the busy time of all workers.
struct WorkTimes {
  int64_t regions = 0;
  int64_t wall = 0;
  int64_t waiting = 0;
  int64_t workers_busy = 0;
};

// A participant's claims on the tasks of one region: `while (tasks.next()) work(tasks.index());`
class Tasks {
 public:
  // Finishes the current task and claims another; false, once, if none is left.
  bool next();
  int64_t index() const { return index_; }
  // Index of the participant; 0 is the caller.
  int number() const { return number_; }
  // Whether the current task is the last of this participant's own range.
  bool last_of_own() const;

 private:
  friend class Pool;

  Pool* pool_ = nullptr;  // nullptr: the caller runs alone and counts for itself
  uint64_t epoch_ = 0;
  int number_ = 0;
  int64_t count_ = 0;
  int64_t index_ = -1;
  int64_t done_ = 0;  // tasks that the region still counts as unfinished
  bool claimed_ = false;  // index_ was claimed before the body began
};

class Pool {
 public:
  static Pool& shared();

  int threads() const { return threads_.load(std::memory_order_relaxed); }
  // 0: one per usable physical core. Takes effect at the next region.
  void set_threads(int threads);

  // Measuring costs two clock reads per region and thread; switching it on resets the figures. label: of the next regions.
  void measure(bool on);
  void label(Work work) { label_.store(work, std::memory_order_relaxed); }
  WorkTimes times(Work work) const;

  // The first task of a participant's range in a region of `tasks` shared by all threads, for prefetches. The same
  // split as in run_region.
  int64_t first_task(int64_t tasks, int number) const { return tasks * number / threads(); }

  // Runs body(Tasks&) on every participant, or on the caller alone unless worth_sharing. The body must claim until next() is false
  // and must not throw.
  template <class Body>
  void run(int64_t tasks, Body&& body, bool worth_sharing = true) {
    auto call = [](void* context, Tasks& claimed) {
      (*static_cast<std::remove_reference_t<Body>*>(context))(claimed);
    };
    run_region(tasks, call, const_cast<void*>(static_cast<const void*>(&body)), worth_sharing);
  }

 private:
  friend class Tasks;
  using Call = void (*)(void*, Tasks&);

  Pool();
  void run_region(int64_t tasks, Call call, void* context, bool worth_sharing);
  void start_workers(int wanted);
  void work(int number);
  void wait_for_tasks(int number);
  bool has_tasks(int number) const;
  bool claim_own(Tasks& tasks, bool any_epoch);
  bool claim_others(Tasks& tasks);
  static void after_fork();

  static constexpr int kMaxThreads = 256;

  // epoch (24 bits) | end (20 bits) | begin (20 bits) of the tasks left, in one word, so that a claim never mixes regions.
  struct alignas(64) Range {
    std::atomic<uint64_t> left{0};
  };
  Range ranges_[kMaxThreads];
  uint64_t epoch_ = 0;  // of the newest region, guarded by busy_
  std::atomic<int> sharing_{1};  // threads with a range of the newest region
  alignas(64) std::atomic<int64_t> unfinished_{0};
  alignas(64) Call call_ = nullptr;  // constant while a task of their region is claimed, as is context_
  void* context_ = nullptr;
  std::atomic<int> threads_{1};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> measures_{false};
  std::atomic<Work> label_{Work::weights};
  struct Clock {
    std::atomic<int64_t> regions{0}, wall{0}, waiting{0}, workers_busy{0};
  };
  alignas(64) Clock clocks_[static_cast<int>(Work::kCount)];
  int started_ = 0;  // workers, guarded by busy_
  std::mutex busy_;  // held by the thread that runs a region
  std::mutex sleep_mutex_;
  std::condition_variable wake_;
};

// One per usable physical core, within a container's CPU quota.
int physical_cores();

}  // namespace headrace
