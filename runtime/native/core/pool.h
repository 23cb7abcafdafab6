// The thread pool: hundreds of parallel regions of a few microseconds per decode step.
//
// Contract. run(tasks, body) hands task numbers [0, tasks) to the calling thread and the workers and returns when all are
// done. Each has a range of its own, taken from the front, so that its tasks follow each other in memory; whoever runs
// out takes from the back of others'. Workers that are late or preempted are not waited for unless they hold a task. A region that finds the pool busy (a second engine) runs on its caller alone. Between regions
// workers spin a few microseconds, then yield, then sleep. Workers are never joined: process exit does not wait for
// them, and a forked child starts without any and makes its own.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <type_traits>

namespace headrace {

class Pool;

// What a region is for, where its time is asked for.
enum class Work : uint8_t { weights, attention, sampling, kCount };

// Of all regions of one kind, in nanoseconds: from entering a region to leaving it, how long the caller waited in it for tasks that
// others held, and how long all workers together were busy.
struct WorkTimes {
  int64_t regions = 0;
  int64_t wall = 0;
  int64_t waiting = 0;
  int64_t workers_busy = 0;
};

// A participant's claims on the tasks of one region: `while (tasks.next()) work(tasks.index());`
class Tasks {
 public:
  // Declares the task in hand done and claims another; false, once, when none is left.
  bool next();
  int64_t index() const { return index_; }
  // Whose range is whose: 0 is the caller's.
  int number() const { return number_; }
  // Whether no task that follows the one in hand is left in this participant's own range.
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
  // 0 means one per physical core this process may use. Takes effect at the next region.
  void set_threads(int threads);

  // Measuring costs two looks at the clock a region and thread; switching it on forgets what was measured. label: of the
  // regions that follow.
  void measure(bool on);
  void label(Work work) { label_.store(work, std::memory_order_relaxed); }
  WorkTimes times(Work work) const;

  // The first task of a participant's range, where a region of `tasks` is shared by all threads.
  int64_t first_task(int64_t tasks, int number) const { return tasks * number / threads(); }

  // Runs body(Tasks&) on every participant; on the caller alone where the work is not worth_sharing. The body must
  // claim until next() is false and must not throw.
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
  alignas(64) Call call_ = nullptr;  // call_ and context_ stand still while a task of their region is claimed
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

// One per physical core this process may run on, at most what a container's CPU quota grants.
int physical_cores();

}  // namespace headrace
