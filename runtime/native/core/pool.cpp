// See pool.h for the contract.
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

constexpr uint64_t pack(uint64_t epoch, uint64_t count) {
  return (epoch & kEpochMask) << (2 * kTaskBits) | count << kTaskBits;
}
constexpr uint64_t epoch_of(uint64_t region) { return region >> (2 * kTaskBits); }
constexpr uint64_t count_of(uint64_t region) { return region >> kTaskBits & kTaskMask; }
constexpr uint64_t next_of(uint64_t region) { return region & kTaskMask; }

}  // namespace

bool Tasks::next() {
  if (claimed_) {
    claimed_ = false;
    return true;
  }
  if (pool_ == nullptr) return ++index_ < count_;
  if (index_ >= 0) pool_->unfinished_.fetch_sub(1, std::memory_order_acq_rel);
  return pool_->claim(*this, false);
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
  threads_.store(std::clamp(threads > 0 ? threads : physical_cores(), 1, 256), std::memory_order_relaxed);
}

// The child has none of the parent's workers and may have copied locks in any state: start afresh.
void Pool::after_fork() {
  Pool& pool = shared();
  const int threads = pool.threads();
  new (&pool) Pool();
  pool.set_threads(threads);
}

bool Pool::claim(Tasks& tasks, bool any_epoch) {
  uint64_t region = region_.load(std::memory_order_acquire);
  while (next_of(region) < count_of(region) && (any_epoch || epoch_of(region) == tasks.epoch_)) {
    if (region_.compare_exchange_weak(region, region + 1, std::memory_order_acq_rel,
                                      std::memory_order_acquire)) {
      tasks.pool_ = this;
      tasks.epoch_ = epoch_of(region);
      tasks.index_ = static_cast<int64_t>(next_of(region));
      return true;
    }
  }
  return false;
}

void Pool::run_region(int64_t tasks, Call call, void* context, bool worth_sharing) {
  if (tasks <= 0) return;
  std::unique_lock<std::mutex> lock(busy_, std::defer_lock);
  const int threads = this->threads();
  if (tasks == 1 || !worth_sharing || threads == 1 || tasks > static_cast<int64_t>(kTaskMask) || !lock.try_lock()) {
    Tasks alone;
    alone.count_ = tasks;
    call(context, alone);
    return;
  }
  if (started_ < threads - 1) start_workers(threads - 1);
  call_ = call;
  context_ = context;
  unfinished_.store(tasks, std::memory_order_relaxed);
  const uint64_t epoch = (epoch_of(region_.load(std::memory_order_relaxed)) + 1) & kEpochMask;
  region_.store(pack(epoch, static_cast<uint64_t>(tasks)), std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) {
    { std::lock_guard<std::mutex> guard(sleep_mutex_); }
    wake_.notify_all();
  }
  Tasks mine;
  mine.pool_ = this;
  mine.epoch_ = epoch;
  call(context, mine);
  for (int spin = 0; unfinished_.load(std::memory_order_acquire) != 0; ++spin) {
    if (spin < kPauses) {
      cpu_pause();
    } else {
      sched_yield();
    }
  }
}

void Pool::start_workers(int wanted) {
  while (started_ < wanted) {
    try {
      std::thread([this, number = started_ + 1] { work(number); }).detach();
    } catch (const std::system_error&) {
      threads_.store(started_ + 1, std::memory_order_relaxed);  // no more to be had: go on with these
      return;
    }
    ++started_;
  }
}

void Pool::work(int number) {
  for (;;) {
    wait_for_tasks(number);
    Tasks mine;
    if (!claim(mine, true)) continue;
    mine.claimed_ = true;  // keeps the region open, so call_ and context_ are this region's
    call_(context_, mine);
  }
}

bool Pool::has_tasks(int number) const {
  const uint64_t region = region_.load(std::memory_order_seq_cst);
  return next_of(region) < count_of(region) && number < threads();
}

void Pool::wait_for_tasks(int number) {
  for (int spin = 0; spin < kPauses; ++spin) {
    if (has_tasks(number)) return;
    cpu_pause();
  }
  const auto start = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() - start < kStayAwake) {
    if (has_tasks(number)) return;
    sched_yield();  // lets anyone else who wants this core have it
  }
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  {
    std::unique_lock<std::mutex> lock(sleep_mutex_);
    wake_.wait(lock, [&] { return has_tasks(number); });
  }
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

}  // namespace headrace
