// Helpers of the kernel tests: failure counts, guarded memory, random numbers, stored number types.
#pragma once

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "../core/half.h"
#include "../core/kernels.h"

namespace headrace::tests {

// Count a failure; the first few are printed.
void check(bool holds, const char* what, const char* where);
int failures();

// The tests, each in a file of nearly its name. driver.cpp calls all: the first five once, the others for each instruction set.
void test_halves();
void test_pool(bool forks);
void test_streaming();
void test_interleaving();
void test_blocks();
void test_projections(const Kernels& kernels);
void test_experts(const Kernels& kernels);
void test_mixers(const Kernels& kernels);
void test_rows(const Kernels& kernels);
void test_attention(const Kernels& kernels);
void test_packed(const Kernels& kernels);
void test_sampling(const Kernels& kernels);

// Memory of exactly `bytes` before an inaccessible page, so that any access past its end crashes. (The address sanitizer does not
// check masked vector loads.) Under the sanitizer the bytes before it are out of bounds, too.
class Guarded {
 public:
  explicit Guarded(int64_t bytes);
  Guarded(Guarded&& other) noexcept;
  Guarded(const Guarded&) = delete;
  ~Guarded();

  template <class T = void>
  T* as() {
    return reinterpret_cast<T*>(begin_);
  }
  template <class T = void>
  const T* as() const {
    return reinterpret_cast<const T*>(begin_);
  }

 private:
  char* pages_;
  int64_t mapped_;
  char* begin_;
};

// Copies of values, as floats or as numbers of a type.
Guarded guarded(const std::vector<float>& values);
Guarded stored(const std::vector<float>& values, Type type);
Guarded random_bytes(int64_t n);
// Numbers from a generator with a fixed seed, so that every run has the same ones.
std::vector<float> random_floats(int64_t n);
// The i-th stored number.
float number(const void* stored, Type type, int64_t i);

}  // namespace headrace::tests
