// Metal's types and functions for clang, as C++ for OpenCL, which has address spaces as Metal's. Nothing is defined.
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#define device __global
#define constant __constant
#define threadgroup __local

typedef half float16_t;
typedef int int32_t;
typedef uint uint32_t;
typedef long int64_t;

enum class mem_flags { mem_none, mem_threadgroup, mem_device };
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
float simd_sum(float);
float simd_max(float);

template <typename To, typename From>
To as_type(From from) {
  return __builtin_bit_cast(To, from);
}

namespace metal {
namespace precise {
float rsqrt(float);
float cos(float);
float sin(float);
float tanh(float);
float exp(float);
}  // namespace precise
float min(float, float);
float max(float, float);
int min(int, int);
int max(int, int);
}  // namespace metal
using namespace metal;
