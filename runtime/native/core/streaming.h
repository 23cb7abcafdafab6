// Streaming read: the memory bandwidth that decode speed is compared with.
//
// runtime/machine/bandwidth.py is the caller. Guard: runtime/native/tests/pools.cpp; tests/runtime/machine/test_bandwidth.py.
#pragma once

#include <cstddef>

namespace headrace {

// Memory that is read from end to end: each thread reads its share in several streams, as the kernels read weights, since one stream
// per core does not reach full bandwidth. Independent of the pool and its number of threads.
class StreamingRead {
 public:
  // At least one page a thread and stream; `streams` is 1, 2, 4 or 8. Throws std::bad_alloc, or std::invalid_argument.
  StreamingRead(std::size_t bytes, int threads, int streams);
  ~StreamingRead();
  StreamingRead(const StreamingRead&) = delete;
  StreamingRead& operator=(const StreamingRead&) = delete;

  // Bytes of a pass: `bytes`, rounded down to whole strands of every thread.
  std::size_t bytes() const { return share_ * static_cast<std::size_t>(threads_); }
  // Seconds from the first thread's start to the last one's end. Throws std::system_error if threads cannot be started.
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
