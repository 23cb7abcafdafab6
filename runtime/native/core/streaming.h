// How fast memory can be read: the ceiling that decode speed is measured against.
#pragma once

#include <cstddef>

namespace headrace {

// Memory that is read from end to end: a share for each thread, of which a thread reads several places side by side, as the
// kernels read weights. The processor's prefetcher follows each place by itself, and one is not enough to fill the way from
// memory. Independent of the pool, whose threads a user may have limited.
class StreamingRead {
 public:
  // At least one page a thread and stream; `streams` is 1, 2, 4 or 8. Throws std::bad_alloc, or std::invalid_argument.
  StreamingRead(std::size_t bytes, int threads, int streams);
  ~StreamingRead();
  StreamingRead(const StreamingRead&) = delete;
  StreamingRead& operator=(const StreamingRead&) = delete;

  // What a pass reads: `bytes`, rounded down to whole strands of every thread.
  std::size_t bytes() const { return share_ * static_cast<std::size_t>(threads_); }
  // Seconds from the first thread's start to the last one's end. Throws std::system_error where threads cannot be had.
  double pass();

 private:
  template <class Work>
  void on_all_threads(Work&& work);

  int threads_;
  int streams_;
  std::size_t share_;  // bytes of a thread
  char* data_ = nullptr;
  std::size_t mapped_ = 0;
};

}  // namespace headrace
