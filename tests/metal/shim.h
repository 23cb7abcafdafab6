// Metal's types and functions for g++: each thread of a threadgroup is a fiber, resumed in a shuffled order.
//
// Barriers and SIMD functions wait for all threads of their group; one that not all reach ends the process with a
// message. Half and bfloat values convert by an explicit cast only, so that no rounding is implied.
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define device
#define constant
#define threadgroup static
#define METAL_FUNC inline

typedef unsigned int uint;
struct uint3 {
  uint x, y, z;
};

struct float16_t {
  _Float16 value;
  float16_t() = default;
  explicit float16_t(float from) : value((_Float16)from) {}
  explicit operator float() const { return (float)value; }
};

struct bfloat16_t {
  uint16_t bits;
  bfloat16_t() = default;
  explicit bfloat16_t(float from) {
    uint32_t wide;
    memcpy(&wide, &from, 4);
    bits = from != from ? 0x7fc0 : (wide + 0x7fff + (wide >> 16 & 1)) >> 16;  // to nearest, ties to even
  }
  explicit operator float() const {
    const uint32_t wide = uint32_t(bits) << 16;
    float to;
    memcpy(&to, &wide, 4);
    return to;
  }
};

template <typename To, typename From>
To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// A group of threads that meet: values of one meeting stay until all have come to the next.
struct Meeting {
  int size, here;
  long turn;
  float values[2][1024];
};

struct Thread {
  ucontext_t context;
  char* stack;
  bool done;
  uint3 thread_position_in_grid, thread_position_in_threadgroup, threadgroup_position_in_grid;
  uint thread_index_in_simdgroup, simdgroup_index_in_threadgroup, thread_index_in_threadgroup;
  Meeting* simd;
  Meeting* all;
};

static Thread threads[1024];
static Meeting simds[32], everyone;
static Thread* self;
static ucontext_t scheduler;
static long progress;

// Wait for all threads of the group, and return the values they came with.
static float* meet(Meeting* group, int index, float value) {
  const long turn = group->turn;
  group->values[turn % 2][index] = value;
  ++progress;
  if (++group->here == group->size) {
    group->here = 0;
    ++group->turn;
  } else {
    Thread* const mine = self;
    while (group->turn == turn) {
      swapcontext(&mine->context, &scheduler);
    }
  }
  return group->values[turn % 2];
}

enum class mem_flags { mem_none, mem_threadgroup, mem_device };

static void threadgroup_barrier(mem_flags) { meet(self->all, self->thread_index_in_threadgroup, 0); }
static void simdgroup_barrier(mem_flags) { meet(self->simd, self->thread_index_in_simdgroup, 0); }

static float simd_sum(float value) {
  float sums[32] = {};
  memcpy(sums, meet(self->simd, self->thread_index_in_simdgroup, value), sizeof(float) * self->simd->size);
  for (int step = 16; step; step /= 2) {
    for (int i = 0; i < step; ++i) {
      sums[i] += sums[i + step];
    }
  }
  return sums[0];
}

static float simd_max(float value) {
  const float* values = meet(self->simd, self->thread_index_in_simdgroup, value);
  float most = values[0];
  for (int i = 1; i < self->simd->size; ++i) {
    most = values[i] > most ? values[i] : most;
  }
  return most;
}

namespace metal {
namespace precise {
inline float rsqrt(float x) { return 1.0f / sqrtf(x); }
inline float cos(float x) { return cosf(x); }
inline float sin(float x) { return sinf(x); }
inline float tanh(float x) { return tanhf(x); }
inline float exp(float x) { return expf(x); }
}  // namespace precise
namespace fast {
inline float exp(float x) { return expf(x); }
inline float exp2(float x) { return exp2f(x); }
}  // namespace fast
inline float min(float a, float b) { return a < b ? a : b; }
inline float max(float a, float b) { return a > b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
}  // namespace metal
using namespace metal;

static void kernel_of_thread();  // calls the kernel with the positions of `self`

static void begin() {
  kernel_of_thread();
  self->done = true;
  ++progress;
  swapcontext(&self->context, &scheduler);
}

static void run_threadgroup(uint3 group, uint3 size, uint3 grid, uint32_t* seed) {
  int count = 0;
  memset(simds, 0, sizeof simds);
  memset(&everyone, 0, sizeof everyone);
  for (uint z = 0; z < size.z; ++z)
    for (uint y = 0; y < size.y; ++y)
      for (uint x = 0; x < size.x; ++x) {
        const uint3 at = {group.x * size.x + x, group.y * size.y + y, group.z * size.z + z};
        if (at.x >= grid.x || at.y >= grid.y || at.z >= grid.z) continue;
        Thread& thread = threads[count];
        if (!thread.stack) thread.stack = (char*)malloc(1 << 16);
        thread.done = false;
        thread.thread_position_in_grid = at;
        thread.thread_position_in_threadgroup = {x, y, z};
        thread.threadgroup_position_in_grid = group;
        thread.thread_index_in_threadgroup = count;
        thread.thread_index_in_simdgroup = count % 32;
        thread.simdgroup_index_in_threadgroup = count / 32;
        thread.simd = &simds[count / 32];
        thread.all = &everyone;
        ++thread.simd->size;
        ++everyone.size;
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack;
        thread.context.uc_stack.ss_size = 1 << 16;
        makecontext(&thread.context, begin, 0);
        ++count;
      }
  int order[1024];
  for (int i = 0; i < count; ++i) {
    order[i] = i;
    *seed = *seed * 1664525u + 1013904223u;
    const int other = *seed / 65536 % (i + 1);
    order[i] = order[other];
    order[other] = i;
  }
  for (int left = count; left;) {
    const long before = progress;
    left = 0;
    for (int i = 0; i < count; ++i) {
      self = &threads[order[i]];
      if (!self->done) swapcontext(&scheduler, &self->context);
      left += !self->done;
    }
    if (progress == before) {
      fprintf(stderr, "threads wait for others that do not come\n");
      abort();
    }
  }
}

static void run_grid(const uint* grid, const uint* size) {
  uint32_t seed = 1;
  for (uint z = 0; z * size[2] < grid[2]; ++z)
    for (uint y = 0; y * size[1] < grid[1]; ++y)
      for (uint x = 0; x * size[0] < grid[0]; ++x) {
        run_threadgroup({x, y, z}, {size[0], size[1], size[2]}, {grid[0], grid[1], grid[2]}, &seed);
      }
}
