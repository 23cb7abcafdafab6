// Runs every kernel on every instruction set and stresses the pool, for sanitizer builds: no Python, no MLX.
//
// Buffers have exactly the size their contract asks for, so that reading one byte too many is seen. Results
// are held to plain loops in double precision. Build and run: runtime/native/tests/sanitize.sh.
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "../core/attend.h"
#include "../core/half.h"
#include "../core/linear.h"
#include "../core/streaming.h"

using namespace headrace;

namespace {

int failures = 0;
std::mt19937 random_bits(7);

void check(bool holds, const char* what, const char* kernels) {
  if (holds) return;
  ++failures;
  std::fprintf(stderr, "FAILED: %s on %s\n", what, kernels);
}

std::vector<float> random_floats(int64_t n) {
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(n));
  for (float& v : values) v = normal(random_bits);
  return values;
}

std::vector<char> stored(const std::vector<float>& values, Type type) {
  std::vector<char> out(values.size() * static_cast<size_t>(size_of(type)));
  for (size_t i = 0; i < values.size(); ++i) {
    const uint16_t half = type == Type::f16 ? f32_to_f16(values[i]) : f32_to_bf16(values[i]);
    if (type == Type::f32) std::memcpy(out.data() + 4 * i, &values[i], 4);
    else std::memcpy(out.data() + 2 * i, &half, 2);
  }
  return out;
}

float number(const std::vector<char>& bytes, Type type, int64_t i) {
  if (type == Type::f32) return load_scalar<Type::f32>(bytes.data(), i);
  return type == Type::f16 ? load_scalar<Type::f16>(bytes.data(), i) : load_scalar<Type::bf16>(bytes.data(), i);
}

struct Projection {
  std::vector<char> data, scales, offsets;
  Matrix view;

  Projection(int64_t n, int64_t k, int bits, int group, Type type) {
    view.n = n;
    view.k = k;
    view.bits = bits;
    view.group = group;
    view.type = type;
    if (bits == 0) {
      data = stored(random_floats(n * k), type);
    } else {
      data.resize(static_cast<size_t>(n * view.row_bytes()));
      for (char& byte : data) byte = static_cast<char>(random_bits());
      scales = stored(random_floats(n * view.groups()), type);
      offsets = stored(random_floats(n * view.groups()), type);
    }
    view.data = data.data();
    view.scales = scales.data();
    view.offsets = offsets.data();
  }

  double at(int64_t row, int64_t k) const {
    if (view.bits == 0) return number(data, view.type, row * view.k + k);
    const int64_t bit = k * view.bits;
    const auto* bytes = reinterpret_cast<const uint8_t*>(data.data()) + row * view.row_bytes() + bit / 8;
    uint32_t q = bytes[0];
    if (bit % 8 + view.bits > 8) q |= static_cast<uint32_t>(bytes[1]) << 8;
    q = q >> bit % 8 & ((1u << view.bits) - 1);
    const int64_t g = row * view.groups() + k / view.group;
    return static_cast<double>(number(scales, view.type, g)) * q + number(offsets, view.type, g);
  }
};

void test_projection(Pool& pool, const Kernels& kernels, int bits, int group, Type type, int64_t rows) {
  const int64_t n = 13, k = bits == 0 ? 149 : 3 * group;
  const Projection w(n, k, bits, group, type);
  const std::vector<float> x = random_floats(rows * k), residual = random_floats(rows * n);
  std::vector<float> out(static_cast<size_t>(rows * n));
  LinearCall call;
  call.x = x.data();
  call.rows = rows;
  call.w = w.view;
  call.residual = residual.data();
  call.out = out.data();
  run_linear(pool, kernels, call);
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t r = 0; r < n; ++r) {
      double sum = residual[m * n + r], scale = std::fabs(sum);
      for (int64_t i = 0; i < k; ++i) {
        sum += w.at(r, i) * x[m * k + i];
        scale += std::fabs(w.at(r, i) * x[m * k + i]);
      }
      if (std::fabs(out[m * n + r] - sum) > 2e-6 * scale) return check(false, "projection", kernels.name);
    }
  }
}

void test_attention(Pool& pool, const Kernels& kernels, Type type, int64_t length, int64_t offset, int64_t window) {
  const int64_t heads = 6, kv_heads = 2, dim = 48, capacity = offset + length;
  const std::vector<float> qkv = random_floats(length * (heads + 2 * kv_heads) * dim);
  std::vector<char> keys = stored(random_floats(kv_heads * capacity * dim), type);
  std::vector<char> values = stored(random_floats(kv_heads * capacity * dim), type);
  std::vector<float> out(static_cast<size_t>(length * heads * dim));
  AttendCall call;
  call.qkv = qkv.data();
  call.keys = keys.data();
  call.values = values.data();
  call.kv_type = type;
  call.batch = 1;
  call.length = length;
  call.heads = heads;
  call.kv_heads = kv_heads;
  call.dim = dim;
  call.capacity = capacity;
  call.offset = offset;
  call.rule = {0.1f, 0.0f};
  call.window = window;
  call.out = out.data();
  run_attend(pool, kernels, call);
  for (int64_t t = 0; t < length; ++t) {
    for (int64_t h = 0; h < heads; ++h) {
      const float* q = qkv.data() + (t * (heads + 2 * kv_heads) + h) * dim;
      const int64_t base = h / (heads / kv_heads) * capacity;
      std::vector<double> expected(static_cast<size_t>(dim), 0.0);
      double total = 0;
      for (int64_t p = first_seen(call, offset + t); p <= offset + t; ++p) {
        double score = 0;
        for (int64_t d = 0; d < dim; ++d) score += q[d] * static_cast<double>(number(keys, type, (base + p) * dim + d));
        const double weight = std::exp(0.1 * score);
        total += weight;
        for (int64_t d = 0; d < dim; ++d) expected[d] += weight * number(values, type, (base + p) * dim + d);
      }
      for (int64_t d = 0; d < dim; ++d) {
        if (std::fabs(out[(t * heads + h) * dim + d] - expected[d] / total) > 2e-5) {
          return check(false, "attention", kernels.name);
        }
      }
    }
  }
}

// Every task runs once, whoever else uses the pool.
void count_regions(Pool& pool, int regions) {
  for (int i = 0; i < regions; ++i) {
    std::vector<int> done(static_cast<size_t>(1 + i % 50), 0);
    pool.run(static_cast<int64_t>(done.size()), [&](Tasks& tasks) {
      while (tasks.next()) ++done[static_cast<size_t>(tasks.index())];
    });
    for (const int times : done) check(times == 1, "a task ran other than once", "the pool");
  }
}

void test_pool() {
  Pool& pool = Pool::shared();
  pool.set_threads(4);
  std::thread other([&] { count_regions(pool, 1000); });
  count_regions(pool, 1000);
  other.join();
  pool.set_threads(2);
  count_regions(pool, 500);
  pool.set_threads(4);
#if !defined(__SANITIZE_THREAD__)  // which does not follow a fork of a threaded process
  const pid_t child = fork();
  if (child == 0) {
    count_regions(pool, 200);
    _exit(failures == 0 ? 0 : 1);
  }
  int status = 1;
  waitpid(child, &status, 0);
  check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "work after a fork", "the pool");
#endif
  const std::vector<char> memory(3 << 20, 1);
  check(streaming_read_seconds(pool, memory.data() + 3, memory.size() - 3, 2) > 0, "streaming read", "the pool");
}

}  // namespace

int main() {
  test_pool();
  Pool& pool = Pool::shared();
  for (const char* name : {"avx512", "avx2", "neon", "portable"}) {
    if (!use_kernels(name)) continue;
    const Kernels& kernels = best_kernels();
    constexpr Type kTypes[] = {Type::f32, Type::f16, Type::bf16};
    int turn = 0;  // each case takes the next type: all meet all widths, without a run of minutes
    for (const int64_t rows : {1, 5, 13, 17}) {
      for (const Type type : kTypes) test_projection(pool, kernels, 0, 0, type, rows);
      for (const int bits : {2, 3, 4, 5, 6, 8}) {
        for (const int group : {32, 64, 128}) test_projection(pool, kernels, bits, group, kTypes[turn++ % 3], rows);
        ++turn;
      }
    }
    for (const int64_t length : {1, 3, 50}) {
      for (const int64_t offset : {0, 150}) {
        for (const int64_t window : {0, 1, 40}) {
          test_attention(pool, kernels, kTypes[turn++ % 3], length, offset, window);
        }
        ++turn;
      }
    }
    std::printf("%s: %s\n", name, failures == 0 ? "passed" : "FAILED");
    std::fflush(stdout);
  }
  // Leave while another thread's regions are still running: exit must neither wait nor crash.
  std::thread([&pool] {
    for (;;) count_regions(pool, 1000);
  }).detach();
  std::fflush(nullptr);
  _exit(failures == 0 ? 0 : 1);
}
