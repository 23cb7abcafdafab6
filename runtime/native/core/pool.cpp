// The thread pool: claims of tasks, and workers' waits (pool.h has the contract).
#include "pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <system_error>
#include <thread>

#include "pause.h"

namespace headrace {
namespace {

constexpr int kTaskBits = 20;
constexpr uint64_t kTaskMask = (uint64_t{1} << kTaskBits) - 1;
constexpr uint64_t kEpochMask = 0xffffff;
constexpr int kPauses = 300;                         // a few microseconds, then yield between looks
constexpr std::chrono::microseconds kStayAwake{80};  // then sleep

// A Range in one word: epoch, end and begin of the tasks left.
constexpr uint64_t pack(uint64_t epoch, uint64_t begin, uint64_t end) {
  return epoch << (2 * kTaskBits) | end << kTaskBits | begin;
}
constexpr uint64_t epoch_of(uint64_t range) { return range >> (2 * kTaskBits); }
constexpr uint64_t end_of(uint64_t range) { return range >> kTaskBits & kTaskMask; }
constexpr uint64_t begin_of(uint64_t range) { return range & kTaskMask; }

int64_t nanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

bool Tasks::next() {
  if (claimed_) {
    claimed_ = false;
    return true;
  }
  if (pool_ == nullptr) return ++index_ < count_;
  if (index_ >= 0) ++done_;  // the task that ends here
  if (pool_->claim_own(*this, false) || pool_->claim_others(*this)) return true;
  pool_->unfinished_.fetch_sub(done_, std::memory_order_acq_rel);  // once per thread: all threads write to this cache line
  return false;
}

bool Tasks::last_of_own() const {
  if (pool_ == nullptr) return index_ + 1 == count_;
  const uint64_t range = pool_->ranges_[number_].left.load(std::memory_order_relaxed);
  return epoch_of(range) != epoch_ || begin_of(range) == end_of(range);
}

Pool& Pool::shared() {
  static Pool* pool = [] {
    pthread_atfork(nullptr, nullptr, &Pool::after_fork);
    return new Pool();
  }();
  return *pool;
}

Pool::Pool() { set_threads(0); }

void Pool::set_threads(int threads) {
  threads_.store(std::clamp(threads > 0 ? threads : physical_cores(), 1, kMaxThreads), std::memory_order_relaxed);
}

// A forked child has no workers and may have locked copies of mutexes: start afresh.
void Pool::after_fork() {
  Pool& pool = shared();
  const int threads = pool.threads();
  new (&pool) Pool();
  pool.set_threads(threads);
}

// Claims the first task left in the thread's own range. any_epoch: of whichever region it is (a worker's first claim); else only of the
// region of `tasks`, whose epoch keeps a late worker from the tasks of the next one.
bool Pool::claim_own(Tasks& tasks, bool any_epoch) {
  std::atomic<uint64_t>& own = ranges_[tasks.number_].left;
  uint64_t range = own.load(std::memory_order_acquire);
  while (begin_of(range) < end_of(range) && (any_epoch || epoch_of(range) == tasks.epoch_)) {
    // `begin` has the lowest bits, so + 1 takes the first task.
    if (own.compare_exchange_weak(range, range + 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
      tasks.pool_ = this;
      tasks.epoch_ = epoch_of(range);
      tasks.index_ = static_cast<int64_t>(begin_of(range));
      return true;
    }
  }
  return false;
}

// Claims the last task left in another thread's range of the same region, beginning with the next thread's.
bool Pool::claim_others(Tasks& tasks) {
  const int sharing = sharing_.load(std::memory_order_relaxed);
  for (int step = 1; step <= sharing; ++step) {
    std::atomic<uint64_t>& other = ranges_[(tasks.number_ + step) % sharing].left;
    uint64_t range = other.load(std::memory_order_acquire);
    while (begin_of(range) < end_of(range) && epoch_of(range) == tasks.epoch_) {
      const uint64_t shorter = pack(epoch_of(range), begin_of(range), end_of(range) - 1);
      if (other.compare_exchange_weak(range, shorter, std::memory_order_acq_rel, std::memory_order_acquire)) {
        tasks.index_ = static_cast<int64_t>(end_of(range)) - 1;
        return true;
      }
    }
  }
  return false;
}

void Pool::run_region(int64_t tasks, Call call, void* context, bool worth_sharing) {
  if (tasks <= 0) return;
  std::unique_lock<std::mutex> lock(busy_, std::defer_lock);
  const int threads = this->threads();
  const bool measures = measures_.load(std::memory_order_relaxed);
  const int64_t began = measures ? nanoseconds() : 0;
  Clock& clock = clocks_[static_cast<int>(label_.load(std::memory_order_relaxed))];
  const auto note = [&](int64_t own_end) {
    const int64_t now = nanoseconds();
    clock.regions.fetch_add(1, std::memory_order_relaxed);
    clock.wall.fetch_add(now - began, std::memory_order_relaxed);
    clock.waiting.fetch_add(now - own_end, std::memory_order_relaxed);
  };

  // Alone: too little work, too many tasks for a Range, or another thread has the pool.
  if (tasks == 1 || !worth_sharing || threads == 1 || tasks > static_cast<int64_t>(kTaskMask) || !lock.try_lock()) {
    Tasks alone;
    alone.count_ = tasks;
    call(context, alone);
    if (measures) note(nanoseconds());
    return;
  }

  // Publish the region. The ranges come last: a worker that claims from one sees call_, context_ and unfinished_.
  if (started_ < threads - 1) start_workers(threads - 1);
  call_ = call;
  context_ = context;
  unfinished_.store(tasks, std::memory_order_relaxed);
  epoch_ = (epoch_ + 1) & kEpochMask;
  const int sharing = std::min(threads, started_ + 1);
  sharing_.store(sharing, std::memory_order_relaxed);
  for (int i = 0; i < sharing; ++i) {  // the same split as in Pool::first_task, or prefetches miss
    const auto begin = static_cast<uint64_t>(tasks * i / sharing), end = static_cast<uint64_t>(tasks * (i + 1) / sharing);
    ranges_[i].left.store(pack(epoch_, begin, end), std::memory_order_seq_cst);
  }
  // A worker counts itself as asleep, then looks for tasks; here tasks come first, then the count. So one of both sees the other. The lock
  // makes sure that a worker that has looked is waiting.
  if (sleepers_.load(std::memory_order_seq_cst) > 0) {
    { std::lock_guard<std::mutex> guard(sleep_mutex_); }
    wake_.notify_all();
  }

  // Take part, then wait for the tasks of others.
  Tasks mine;
  mine.pool_ = this;
  mine.epoch_ = epoch_;
  call(context, mine);
  const int64_t own_end = measures ? nanoseconds() : 0;
  for (int spin = 0; unfinished_.load(std::memory_order_acquire) != 0; ++spin) {
    if (spin < kPauses) {
      cpu_pause();
    } else {
      sched_yield();
    }
  }
  if (measures) note(own_end);
}

void Pool::measure(bool on) {
  for (Clock& clock : clocks_) {
    for (std::atomic<int64_t>* value : {&clock.regions, &clock.wall, &clock.waiting, &clock.workers_busy}) value->store(0);
  }
  measures_.store(on);
}

WorkTimes Pool::times(Work work) const {
  const Clock& clock = clocks_[static_cast<int>(work)];
  return {clock.regions.load(), clock.wall.load(), clock.waiting.load(), clock.workers_busy.load()};
}

void Pool::start_workers(int wanted) {
  while (started_ < wanted) {
    try {
      std::thread([this, number = started_ + 1] { work(number); }).detach();
    } catch (const std::system_error&) {
      threads_.store(started_ + 1, std::memory_order_relaxed);  // the system has no more threads
      return;
    }
    ++started_;
  }
}

// The life of a worker.
void Pool::work(int number) {
  for (;;) {
    wait_for_tasks(number);
    Tasks mine;
    mine.number_ = number;
    if (!claim_own(mine, true)) continue;
    mine.claimed_ = true;  // keeps the region open, so call_ and context_ are this region's
    if (!measures_.load(std::memory_order_relaxed)) {
      call_(context_, mine);
      continue;
    }
    Clock& clock = clocks_[static_cast<int>(label_.load(std::memory_order_relaxed))];
    const int64_t began = nanoseconds();
    call_(context_, mine);
    clock.workers_busy.fetch_add(nanoseconds() - began, std::memory_order_relaxed);
  }
}

bool Pool::has_tasks(int number) const {
  const uint64_t range = ranges_[number].left.load(std::memory_order_seq_cst);
  return begin_of(range) < end_of(range);
}

// Returns once the worker's own range has tasks: looks, then yields between looks for kStayAwake, then sleeps.
void Pool::wait_for_tasks(int number) {
  for (int spin = 0; spin < kPauses; ++spin) {
    if (has_tasks(number)) return;
    cpu_pause();
  }
  const auto start = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() - start < kStayAwake) {
    if (has_tasks(number)) return;
    sched_yield();  // lets other threads run
  }
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  {
    std::unique_lock<std::mutex> lock(sleep_mutex_);
    wake_.wait(lock, [&] { return has_tasks(number); });
  }
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

}  // namespace headrace
