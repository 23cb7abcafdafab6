// Base of headrace's graph nodes: CPU only, no gradients. A node's eval_cpu allocates outputs and dispatches one task to its stream.
// Guard: tests/runtime/ops/test_native_lifetime.py frees nodes while others wait for their stream.
#pragma once

#include <stdexcept>

#include "mlx/device.h"
#include "mlx/primitives.h"
#include "mlx/stream.h"

namespace headrace {

namespace mx = mlx::core;

inline mx::Stream cpu_stream() { return mx::default_stream(mx::Device(mx::Device::cpu)); }

class Node : public mx::Primitive {
 public:
  using mx::Primitive::Primitive;

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("headrace's native kernels run on the CPU");
  }
};

}  // namespace headrace
