template <typename T, int WIDTH, int THREADS, int EPS>
[[kernel]] void custom_kernel_headrace_add_norms_weight__float16_t_1120_288_897988541_float16_t_float16_t_float16_t_float16_t_float16_t(
  const device float16_t* x [[buffer(0)]],
  const device float16_t* residual [[buffer(1)]],
  const device float16_t* weight [[buffer(2)]],
  device float16_t* total [[buffer(3)]],
  device float16_t* normed [[buffer(4)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 thread_position_in_threadgroup [[thread_position_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {

constexpr int STEPS = (WIDTH + 4 * THREADS - 1) / (4 * THREADS);
const int thread = thread_position_in_threadgroup.x;
const int lane = thread_index_in_simdgroup;
const size_t row = size_t(threadgroup_position_in_grid.y) * WIDTH;
const float eps = as_type<float>(EPS);
float held[4 * STEPS];
for (int n = 0; n < 4 * STEPS; ++n) {
  const int i = (n / 4 * THREADS + thread) * 4 + n % 4;
  held[n] = i < WIDTH ? float(x[row + i]) : 0.0f;
}

for (int n = 0; n < 4 * STEPS; ++n) {
  const int i = (n / 4 * THREADS + thread) * 4 + n % 4;
  if (i < WIDTH) {
    held[n] = float(T(float(residual[row + i]) + held[n]));
    total[row + i] = T(held[n]);
  }
}

threadgroup float weight_sums[32];
float weight_sum = 0.0f;
for (int n = 0; n < 4 * STEPS; ++n) {
  weight_sum += held[n] * held[n];
}
weight_sum = simd_sum(weight_sum);
if (lane == 0) {
  weight_sums[simdgroup_index_in_threadgroup] = weight_sum;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
weight_sum = simd_sum(lane < THREADS / 32 ? weight_sums[lane] : 0.0f);
const float weight_scale = metal::precise::rsqrt(weight_sum / WIDTH + eps);

for (int n = 0; n < 4 * STEPS; ++n) {
  const int i = (n / 4 * THREADS + thread) * 4 + n % 4;
  if (i < WIDTH) {
    normed[row + i] = T(float(T(float(T(held[n] * weight_scale)) * float(weight[i]))));
  }
}

}

template [[host_name("custom_kernel_headrace_add_norms_weight__float16_t_1120_288_897988541_float16_t_float16_t_float16_t_float16_t_float16_t")]] [[kernel]] decltype(custom_kernel_headrace_add_norms_weight__float16_t_1120_288_897988541_float16_t_float16_t_float16_t_float16_t_float16_t<float16_t, 1120, 288, 897988541>) custom_kernel_headrace_add_norms_weight__float16_t_1120_288_897988541_float16_t_float16_t_float16_t_float16_t_float16_t<float16_t, 1120, 288, 897988541>;

template <typename T, int WIDTH, int THREADS, int EPS>
[[kernel]] void custom_kernel_headrace_add_norms_post__float16_t_1120_288_897988541_float16_t_float16_t_float16_t_float16_t(
  const device float16_t* x [[buffer(0)]],
  const device float16_t* residual [[buffer(1)]],
  const device float16_t* post [[buffer(2)]],
  device float16_t* total [[buffer(3)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 thread_position_in_threadgroup [[thread_position_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {

constexpr int STEPS = (WIDTH + 4 * THREADS - 1) / (4 * THREADS);
const int thread = thread_position_in_threadgroup.x;
const int lane = thread_index_in_simdgroup;
const size_t row = size_t(threadgroup_position_in_grid.y) * WIDTH;
const float eps = as_type<float>(EPS);
float held[4 * STEPS];
for (int n = 0; n < 4 * STEPS; ++n) {
  const int i = (n / 4 * THREADS + thread) * 4 + n % 4;
  held[n] = i < WIDTH ? float(x[row + i]) : 0.0f;
}

threadgroup float post_sums[32];
float post_sum = 0.0f;
for (int n = 0; n < 4 * STEPS; ++n) {
  post_sum += held[n] * held[n];
}
post_sum = simd_sum(post_sum);
if (lane == 0) {
  post_sums[simdgroup_index_in_threadgroup] = post_sum;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
post_sum = simd_sum(lane < THREADS / 32 ? post_sums[lane] : 0.0f);
const float post_scale = metal::precise::rsqrt(post_sum / WIDTH + eps);

for (int n = 0; n < 4 * STEPS; ++n) {
  const int i = (n / 4 * THREADS + thread) * 4 + n % 4;
  if (i < WIDTH) {
    held[n] = float(T(float(T(held[n] * post_scale)) * float(post[i])));
  }
}

for (int n = 0; n < 4 * STEPS; ++n) {
  const int i = (n / 4 * THREADS + thread) * 4 + n % 4;
  if (i < WIDTH) {
    held[n] = float(T(float(residual[row + i]) + held[n]));
    total[row + i] = T(held[n]);
  }
}

}

template [[host_name("custom_kernel_headrace_add_norms_post__float16_t_1120_288_897988541_float16_t_float16_t_float16_t_float16_t")]] [[kernel]] decltype(custom_kernel_headrace_add_norms_post__float16_t_1120_288_897988541_float16_t_float16_t_float16_t_float16_t<float16_t, 1120, 288, 897988541>) custom_kernel_headrace_add_norms_post__float16_t_1120_288_897988541_float16_t_float16_t_float16_t_float16_t<float16_t, 1120, 288, 897988541>;

template <typename T, int WIDTH, int THREADS, int EPS>
[[kernel]] void custom_kernel_headrace_add_norms_post_weight__float16_t_1120_288_897988541_float16_t_float16_t_float16_t_float16_t_float16_t_float16_t(
  const device float16_t* x [[buffer(0)]],
  const device float16_t* residual [[buffer(1)]],
  const device float16_t* post [[buffer(2)]],
  const device float16_t* weight [[buffer(3)]],
  device float16_t* total [[buffer(4)]],
  device float16_t* normed [[buffer(5)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 thread_position_in_threadgroup [[thread_position_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {

constexpr int STEPS = (WIDTH + 4 * THREADS - 1) / (4 * THREADS);
const int thread = thread_position_in_threadgroup.x;
const int lane = thread_index_in_simdgroup;
const size_t row = size_t(threadgroup_position_in_grid.y) * WIDTH;
const float eps = as_type<float>(EPS);
float held[4 * STEPS];
for (int n = 0; n < 4 * STEPS; ++n) {
  const int i = (n / 4 * THREADS + thread) * 4 + n % 4;
  held[n] = i < WIDTH ? float(x[row + i]) : 0.0f;
}

threadgroup float post_sums[32];
float post_sum = 0.0f;
for (int n = 0; n < 4 * STEPS; ++n) {
  post_sum += held[n] * held[n];
}
post_sum = simd_sum(post_sum);
if (lane == 0) {
  post_sums[simdgroup_index_in_threadgroup] = post_sum;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
post_sum = simd_sum(lane < THREADS / 32 ? post_sums[lane] : 0.0f);
const float post_scale = metal::precise::rsqrt(post_sum / WIDTH + eps);

for (int n = 0; n < 4 * STEPS; ++n) {
  const int i = (n / 4 * THREADS + thread) * 4 + n % 4;
  if (i < WIDTH) {
    held[n] = float(T(float(T(held[n] * post_scale)) * float(post[i])));
  }
}

for (int n = 0; n < 4 * STEPS; ++n) {
  const int i = (n / 4 * THREADS + thread) * 4 + n % 4;
  if (i < WIDTH) {
    held[n] = float(T(float(residual[row + i]) + held[n]));
    total[row + i] = T(held[n]);
  }
}

threadgroup float weight_sums[32];
float weight_sum = 0.0f;
for (int n = 0; n < 4 * STEPS; ++n) {
  weight_sum += held[n] * held[n];
}
weight_sum = simd_sum(weight_sum);
if (lane == 0) {
  weight_sums[simdgroup_index_in_threadgroup] = weight_sum;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
weight_sum = simd_sum(lane < THREADS / 32 ? weight_sums[lane] : 0.0f);
const float weight_scale = metal::precise::rsqrt(weight_sum / WIDTH + eps);

for (int n = 0; n < 4 * STEPS; ++n) {
  const int i = (n / 4 * THREADS + thread) * 4 + n % 4;
  if (i < WIDTH) {
    normed[row + i] = T(float(T(float(T(held[n] * weight_scale)) * float(weight[i]))));
  }
}

}

template [[host_name("custom_kernel_headrace_add_norms_post_weight__float16_t_1120_288_897988541_float16_t_float16_t_float16_t_float16_t_float16_t_float16_t")]] [[kernel]] decltype(custom_kernel_headrace_add_norms_post_weight__float16_t_1120_288_897988541_float16_t_float16_t_float16_t_float16_t_float16_t_float16_t<float16_t, 1120, 288, 897988541>) custom_kernel_headrace_add_norms_post_weight__float16_t_1120_288_897988541_float16_t_float16_t_float16_t_float16_t_float16_t_float16_t<float16_t, 1120, 288, 897988541>;

template <typename T, int WIDTH, int THREADS, int EPS>
[[kernel]] void custom_kernel_headrace_add_norms_post_scalar_weight__float16_t_1120_288_897988541_float16_t_float16_t_float16_t_float16_tc_float16_t_float16_t_float16_t(
  const device float16_t* x [[buffer(0)]],
  const device float16_t* residual [[buffer(1)]],
  const device float16_t* post [[buffer(2)]],
  const constant float16_t* scalar [[buffer(3)]],
  const device float16_t* weight [[buffer(4)]],
  device float16_t* total [[buffer(5)]],
  device float16_t* normed [[buffer(6)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 thread_position_in_threadgroup [[thread_position_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {

constexpr int STEPS = (WIDTH + 4 * THREADS - 1) / (4 * THREADS);
const int thread = thread_position_in_threadgroup.x;
const int lane = thread_index_in_simdgroup;
const size_t row = size_t(threadgroup_position_in_grid.y) * WIDTH;
const float eps = as_type<float>(EPS);
float held[4 * STEPS];
for (int n = 0; n < 4 * STEPS; ++n) {
  const int i = (n / 4 * THREADS + thread) * 4 + n % 4;
  held[n] = i < WIDTH ? float(x[row + i]) : 0.0f;
}

threadgroup float post_sums[32];
float post_sum = 0.0f;
for (int n = 0; n < 4 * STEPS; ++n) {
  post_sum += held[n] * held[n];
}
post_sum = simd_sum(post_sum);
if (lane == 0) {
  post_sums[simdgroup_index_in_threadgroup] = post_sum;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
post_sum = simd_sum(lane < THREADS / 32 ? post_sums[lane] : 0.0f);
const float post_scale = metal::precise::rsqrt(post_sum / WIDTH + eps);

for (int n = 0; n < 4 * STEPS; ++n) {
  const int i = (n / 4 * THREADS + thread) * 4 + n % 4;
  if (i < WIDTH) {
    held[n] = float(T(float(T(held[n] * post_scale)) * float(post[i])));
  }
}

for (int n = 0; n < 4 * STEPS; ++n) {
  const int i = (n / 4 * THREADS + thread) * 4 + n % 4;
  if (i < WIDTH) {
    held[n] = float(T(float(residual[row + i]) + held[n]));
    held[n] = float(T(held[n] * float(scalar[0])));
    total[row + i] = T(held[n]);
  }
}

threadgroup float weight_sums[32];
float weight_sum = 0.0f;
for (int n = 0; n < 4 * STEPS; ++n) {
  weight_sum += held[n] * held[n];
}
weight_sum = simd_sum(weight_sum);
if (lane == 0) {
  weight_sums[simdgroup_index_in_threadgroup] = weight_sum;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
weight_sum = simd_sum(lane < THREADS / 32 ? weight_sums[lane] : 0.0f);
const float weight_scale = metal::precise::rsqrt(weight_sum / WIDTH + eps);

for (int n = 0; n < 4 * STEPS; ++n) {
  const int i = (n / 4 * THREADS + thread) * 4 + n % 4;
  if (i < WIDTH) {
    normed[row + i] = T(float(T(float(T(held[n] * weight_scale)) * float(weight[i]))));
  }
}

}

template [[host_name("custom_kernel_headrace_add_norms_post_scalar_weight__float16_t_1120_288_897988541_float16_t_float16_t_float16_t_float16_tc_float16_t_float16_t_float16_t")]] [[kernel]] decltype(custom_kernel_headrace_add_norms_post_scalar_weight__float16_t_1120_288_897988541_float16_t_float16_t_float16_t_float16_tc_float16_t_float16_t_float16_t<float16_t, 1120, 288, 897988541>) custom_kernel_headrace_add_norms_post_scalar_weight__float16_t_1120_288_897988541_float16_t_float16_t_float16_t_float16_tc_float16_t_float16_t_float16_t<float16_t, 1120, 288, 897988541>;

template <typename T, int D, int EPS, int Q_HEADS, int K_HEADS, int V_HEADS, int DIMS, int AMPLITUDE>
[[kernel]] void custom_kernel_headrace_place_heads_q_k_q_norm_k_norm_periods_offset_first__float16_t_128_897988541_6_2_0_64_1065353216_float16_t_float16_t_float16_t_float16_t_float_int32_tc_float16_t_float16_t(
  const device float16_t* q [[buffer(0)]],
  const constant int* q_shape [[buffer(1)]],
  const constant int64_t* q_strides [[buffer(2)]],
  const device float16_t* k [[buffer(3)]],
  const constant int64_t* k_strides [[buffer(4)]],
  const device float16_t* q_norm [[buffer(5)]],
  const constant int64_t* q_norm_strides [[buffer(6)]],
  const device float16_t* k_norm [[buffer(7)]],
  const constant int64_t* k_norm_strides [[buffer(8)]],
  const device float* periods [[buffer(9)]],
  const constant int64_t* periods_strides [[buffer(10)]],
  const constant int32_t* offset [[buffer(11)]],
  const constant int* offset_shape [[buffer(12)]],
  device float16_t* q_out [[buffer(13)]],
  device float16_t* k_out [[buffer(14)]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 thread_position_in_grid [[thread_position_in_grid]]) {

const int lane = thread_index_in_simdgroup;
const int head = thread_position_in_grid.y;
const int length = q_shape[1];
const int64_t batch = thread_position_in_grid.z / length;
const int64_t token = thread_position_in_grid.z % length;
float held[D / 32];

if (head >= 0 && head < 0 + Q_HEADS) {
  const int own = head - (0);
  for (int n = 0; n < D / 32; ++n) {
    const int i = own * D + lane + 32 * n;
    held[n] = float(q[batch * q_strides[0] + token * q_strides[1] + i * q_strides[2]]);
  }

  float sum = 0.0f;
  for (int n = 0; n < D / 32; ++n) {
    sum += held[n] * held[n];
  }
  const float scale = metal::precise::rsqrt(simd_sum(sum) / D + as_type<float>(EPS));
  for (int n = 0; n < D / 32; ++n) {
    const int i = lane + 32 * n;
    held[n] = float(T(float(T(held[n] * scale)) * float(q_norm[i * q_norm_strides[0]])));
  }

  const float amplitude = as_type<float>(AMPLITUDE);
  const float position = float(offset[offset_shape[0] > 1 ? batch : 0] + token);
  for (int n = 0; n < DIMS / 64; ++n) {
    const float angle = position * (1.0f / periods[(lane + 32 * n) * periods_strides[0]]);
    const float cosine = metal::precise::cos(angle), sine = metal::precise::sin(angle);
    const float one = float(T(held[n] * amplitude)), other = float(T(held[n + DIMS / 64] * amplitude));
    held[n] = float(T(one * cosine - other * sine));
    held[n + DIMS / 64] = float(T(one * sine + other * cosine));
  }

  for (int n = 0; n < D / 32; ++n) {
    q_out[((batch * Q_HEADS + own) * length + token) * D + lane + 32 * n] = T(held[n]);
  }
}

if (head >= 0 + Q_HEADS && head < 0 + Q_HEADS + K_HEADS) {
  const int own = head - (0 + Q_HEADS);
  for (int n = 0; n < D / 32; ++n) {
    const int i = own * D + lane + 32 * n;
    held[n] = float(k[batch * k_strides[0] + token * k_strides[1] + i * k_strides[2]]);
  }

  float sum = 0.0f;
  for (int n = 0; n < D / 32; ++n) {
    sum += held[n] * held[n];
  }
  const float scale = metal::precise::rsqrt(simd_sum(sum) / D + as_type<float>(EPS));
  for (int n = 0; n < D / 32; ++n) {
    const int i = lane + 32 * n;
    held[n] = float(T(float(T(held[n] * scale)) * float(k_norm[i * k_norm_strides[0]])));
  }

  const float amplitude = as_type<float>(AMPLITUDE);
  const float position = float(offset[offset_shape[0] > 1 ? batch : 0] + token);
  for (int n = 0; n < DIMS / 64; ++n) {
    const float angle = position * (1.0f / periods[(lane + 32 * n) * periods_strides[0]]);
    const float cosine = metal::precise::cos(angle), sine = metal::precise::sin(angle);
    const float one = float(T(held[n] * amplitude)), other = float(T(held[n + DIMS / 64] * amplitude));
    held[n] = float(T(one * cosine - other * sine));
    held[n + DIMS / 64] = float(T(one * sine + other * cosine));
  }

  for (int n = 0; n < D / 32; ++n) {
    k_out[((batch * K_HEADS + own) * length + token) * D + lane + 32 * n] = T(held[n]);
  }
}

}

template [[host_name("custom_kernel_headrace_place_heads_q_k_q_norm_k_norm_periods_offset_first__float16_t_128_897988541_6_2_0_64_1065353216_float16_t_float16_t_float16_t_float16_t_float_int32_tc_float16_t_float16_t")]] [[kernel]] decltype(custom_kernel_headrace_place_heads_q_k_q_norm_k_norm_periods_offset_first__float16_t_128_897988541_6_2_0_64_1065353216_float16_t_float16_t_float16_t_float16_t_float_int32_tc_float16_t_float16_t<float16_t, 128, 897988541, 6, 2, 0, 64, 1065353216>) custom_kernel_headrace_place_heads_q_k_q_norm_k_norm_periods_offset_first__float16_t_128_897988541_6_2_0_64_1065353216_float16_t_float16_t_float16_t_float16_t_float_int32_tc_float16_t_float16_t<float16_t, 128, 897988541, 6, 2, 0, 64, 1065353216>;

template <typename T, int D, int EPS, int Q_HEADS, int K_HEADS, int V_HEADS, int DIMS, int AMPLITUDE>
[[kernel]] void custom_kernel_headrace_place_heads_q_k_v_q_norm_k_norm_periods_offset_first__float16_t_128_897988541_6_2_2_64_1065353216_float16_t_float16_t_float16_t_float16_t_float16_t_float_int32_tc_float16_t_float16_t_float16_t(
  const device float16_t* q [[buffer(0)]],
  const constant int* q_shape [[buffer(1)]],
  const constant int64_t* q_strides [[buffer(2)]],
  const device float16_t* k [[buffer(3)]],
  const constant int64_t* k_strides [[buffer(4)]],
  const device float16_t* v [[buffer(5)]],
  const constant int64_t* v_strides [[buffer(6)]],
  const device float16_t* q_norm [[buffer(7)]],
  const constant int64_t* q_norm_strides [[buffer(8)]],
  const device float16_t* k_norm [[buffer(9)]],
  const constant int64_t* k_norm_strides [[buffer(10)]],
  const device float* periods [[buffer(11)]],
  const constant int64_t* periods_strides [[buffer(12)]],
  const constant int32_t* offset [[buffer(13)]],
  const constant int* offset_shape [[buffer(14)]],
  device float16_t* q_out [[buffer(15)]],
  device float16_t* k_out [[buffer(16)]],
  device float16_t* v_out [[buffer(17)]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 thread_position_in_grid [[thread_position_in_grid]]) {

const int lane = thread_index_in_simdgroup;
const int head = thread_position_in_grid.y;
const int length = q_shape[1];
const int64_t batch = thread_position_in_grid.z / length;
const int64_t token = thread_position_in_grid.z % length;
float held[D / 32];

if (head >= 0 && head < 0 + Q_HEADS) {
  const int own = head - (0);
  for (int n = 0; n < D / 32; ++n) {
    const int i = own * D + lane + 32 * n;
    held[n] = float(q[batch * q_strides[0] + token * q_strides[1] + i * q_strides[2]]);
  }

  float sum = 0.0f;
  for (int n = 0; n < D / 32; ++n) {
    sum += held[n] * held[n];
  }
  const float scale = metal::precise::rsqrt(simd_sum(sum) / D + as_type<float>(EPS));
  for (int n = 0; n < D / 32; ++n) {
    const int i = lane + 32 * n;
    held[n] = float(T(float(T(held[n] * scale)) * float(q_norm[i * q_norm_strides[0]])));
  }

  const float amplitude = as_type<float>(AMPLITUDE);
  const float position = float(offset[offset_shape[0] > 1 ? batch : 0] + token);
  for (int n = 0; n < DIMS / 64; ++n) {
    const float angle = position * (1.0f / periods[(lane + 32 * n) * periods_strides[0]]);
    const float cosine = metal::precise::cos(angle), sine = metal::precise::sin(angle);
    const float one = float(T(held[n] * amplitude)), other = float(T(held[n + DIMS / 64] * amplitude));
    held[n] = float(T(one * cosine - other * sine));
    held[n + DIMS / 64] = float(T(one * sine + other * cosine));
  }

  for (int n = 0; n < D / 32; ++n) {
    q_out[((batch * Q_HEADS + own) * length + token) * D + lane + 32 * n] = T(held[n]);
  }
}

if (head >= 0 + Q_HEADS && head < 0 + Q_HEADS + K_HEADS) {
  const int own = head - (0 + Q_HEADS);
  for (int n = 0; n < D / 32; ++n) {
    const int i = own * D + lane + 32 * n;
    held[n] = float(k[batch * k_strides[0] + token * k_strides[1] + i * k_strides[2]]);
  }

  float sum = 0.0f;
  for (int n = 0; n < D / 32; ++n) {
    sum += held[n] * held[n];
  }
  const float scale = metal::precise::rsqrt(simd_sum(sum) / D + as_type<float>(EPS));
  for (int n = 0; n < D / 32; ++n) {
    const int i = lane + 32 * n;
    held[n] = float(T(float(T(held[n] * scale)) * float(k_norm[i * k_norm_strides[0]])));
  }

  const float amplitude = as_type<float>(AMPLITUDE);
  const float position = float(offset[offset_shape[0] > 1 ? batch : 0] + token);
  for (int n = 0; n < DIMS / 64; ++n) {
    const float angle = position * (1.0f / periods[(lane + 32 * n) * periods_strides[0]]);
    const float cosine = metal::precise::cos(angle), sine = metal::precise::sin(angle);
    const float one = float(T(held[n] * amplitude)), other = float(T(held[n + DIMS / 64] * amplitude));
    held[n] = float(T(one * cosine - other * sine));
    held[n + DIMS / 64] = float(T(one * sine + other * cosine));
  }

  for (int n = 0; n < D / 32; ++n) {
    k_out[((batch * K_HEADS + own) * length + token) * D + lane + 32 * n] = T(held[n]);
  }
}

if (head >= 0 + Q_HEADS + K_HEADS && head < 0 + Q_HEADS + K_HEADS + V_HEADS) {
  const int own = head - (0 + Q_HEADS + K_HEADS);
  for (int n = 0; n < D / 32; ++n) {
    const int i = own * D + lane + 32 * n;
    held[n] = float(v[batch * v_strides[0] + token * v_strides[1] + i * v_strides[2]]);
  }

  float sum = 0.0f;
  for (int n = 0; n < D / 32; ++n) {
    sum += held[n] * held[n];
  }
  const float scale = metal::precise::rsqrt(simd_sum(sum) / D + as_type<float>(EPS));
  for (int n = 0; n < D / 32; ++n) {
    const int i = lane + 32 * n;
    held[n] = float(T(float(T(held[n] * scale)) * 1.0f));
  }

  for (int n = 0; n < D / 32; ++n) {
    v_out[((batch * V_HEADS + own) * length + token) * D + lane + 32 * n] = T(held[n]);
  }
}

}

template [[host_name("custom_kernel_headrace_place_heads_q_k_v_q_norm_k_norm_periods_offset_first__float16_t_128_897988541_6_2_2_64_1065353216_float16_t_float16_t_float16_t_float16_t_float16_t_float_int32_tc_float16_t_float16_t_float16_t")]] [[kernel]] decltype(custom_kernel_headrace_place_heads_q_k_v_q_norm_k_norm_periods_offset_first__float16_t_128_897988541_6_2_2_64_1065353216_float16_t_float16_t_float16_t_float16_t_float16_t_float_int32_tc_float16_t_float16_t_float16_t<float16_t, 128, 897988541, 6, 2, 2, 64, 1065353216>) custom_kernel_headrace_place_heads_q_k_v_q_norm_k_norm_periods_offset_first__float16_t_128_897988541_6_2_2_64_1065353216_float16_t_float16_t_float16_t_float16_t_float16_t_float_int32_tc_float16_t_float16_t_float16_t<float16_t, 128, 897988541, 6, 2, 2, 64, 1065353216>;

template <typename T, int D, int EPS, int Q_HEADS, int K_HEADS, int V_HEADS, int DIMS, int AMPLITUDE>
[[kernel]] void custom_kernel_headrace_place_heads_q_k_q_norm_k_norm_periods_offset_last__float16_t_128_897988541_6_2_0_64_1065353216_float16_t_float16_t_float16_t_float16_t_float_int32_tc_float16_t_float16_t(
  const device float16_t* q [[buffer(0)]],
  const constant int* q_shape [[buffer(1)]],
  const constant int64_t* q_strides [[buffer(2)]],
  const device float16_t* k [[buffer(3)]],
  const constant int64_t* k_strides [[buffer(4)]],
  const device float16_t* q_norm [[buffer(5)]],
  const constant int64_t* q_norm_strides [[buffer(6)]],
  const device float16_t* k_norm [[buffer(7)]],
  const constant int64_t* k_norm_strides [[buffer(8)]],
  const device float* periods [[buffer(9)]],
  const constant int64_t* periods_strides [[buffer(10)]],
  const constant int32_t* offset [[buffer(11)]],
  const constant int* offset_shape [[buffer(12)]],
  device float16_t* q_out [[buffer(13)]],
  device float16_t* k_out [[buffer(14)]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 thread_position_in_grid [[thread_position_in_grid]]) {

const int lane = thread_index_in_simdgroup;
const int head = thread_position_in_grid.y;
const int length = q_shape[1];
const int64_t batch = thread_position_in_grid.z / length;
const int64_t token = thread_position_in_grid.z % length;
float held[D / 32];

if (head >= 0 && head < 0 + Q_HEADS) {
  const int own = head - (0);
  for (int n = 0; n < D / 32; ++n) {
    const int i = own * D + lane + 32 * n;
    held[n] = float(q[batch * q_strides[0] + token * q_strides[1] + i * q_strides[2]]);
  }

  const float amplitude = as_type<float>(AMPLITUDE);
  const float position = float(offset[offset_shape[0] > 1 ? batch : 0] + token);
  for (int n = 0; n < DIMS / 64; ++n) {
    const float angle = position * (1.0f / periods[(lane + 32 * n) * periods_strides[0]]);
    const float cosine = metal::precise::cos(angle), sine = metal::precise::sin(angle);
    const float one = float(T(held[n] * amplitude)), other = float(T(held[n + DIMS / 64] * amplitude));
    held[n] = float(T(one * cosine - other * sine));
    held[n + DIMS / 64] = float(T(one * sine + other * cosine));
  }

  float sum = 0.0f;
  for (int n = 0; n < D / 32; ++n) {
    sum += held[n] * held[n];
  }
  const float scale = metal::precise::rsqrt(simd_sum(sum) / D + as_type<float>(EPS));
  for (int n = 0; n < D / 32; ++n) {
    const int i = lane + 32 * n;
    held[n] = float(T(float(T(held[n] * scale)) * float(q_norm[i * q_norm_strides[0]])));
  }

  for (int n = 0; n < D / 32; ++n) {
    q_out[((batch * Q_HEADS + own) * length + token) * D + lane + 32 * n] = T(held[n]);
  }
}

if (head >= 0 + Q_HEADS && head < 0 + Q_HEADS + K_HEADS) {
  const int own = head - (0 + Q_HEADS);
  for (int n = 0; n < D / 32; ++n) {
    const int i = own * D + lane + 32 * n;
    held[n] = float(k[batch * k_strides[0] + token * k_strides[1] + i * k_strides[2]]);
  }

  const float amplitude = as_type<float>(AMPLITUDE);
  const float position = float(offset[offset_shape[0] > 1 ? batch : 0] + token);
  for (int n = 0; n < DIMS / 64; ++n) {
    const float angle = position * (1.0f / periods[(lane + 32 * n) * periods_strides[0]]);
    const float cosine = metal::precise::cos(angle), sine = metal::precise::sin(angle);
    const float one = float(T(held[n] * amplitude)), other = float(T(held[n + DIMS / 64] * amplitude));
    held[n] = float(T(one * cosine - other * sine));
    held[n + DIMS / 64] = float(T(one * sine + other * cosine));
  }

  float sum = 0.0f;
  for (int n = 0; n < D / 32; ++n) {
    sum += held[n] * held[n];
  }
  const float scale = metal::precise::rsqrt(simd_sum(sum) / D + as_type<float>(EPS));
  for (int n = 0; n < D / 32; ++n) {
    const int i = lane + 32 * n;
    held[n] = float(T(float(T(held[n] * scale)) * float(k_norm[i * k_norm_strides[0]])));
  }

  for (int n = 0; n < D / 32; ++n) {
    k_out[((batch * K_HEADS + own) * length + token) * D + lane + 32 * n] = T(held[n]);
  }
}

}

template [[host_name("custom_kernel_headrace_place_heads_q_k_q_norm_k_norm_periods_offset_last__float16_t_128_897988541_6_2_0_64_1065353216_float16_t_float16_t_float16_t_float16_t_float_int32_tc_float16_t_float16_t")]] [[kernel]] decltype(custom_kernel_headrace_place_heads_q_k_q_norm_k_norm_periods_offset_last__float16_t_128_897988541_6_2_0_64_1065353216_float16_t_float16_t_float16_t_float16_t_float_int32_tc_float16_t_float16_t<float16_t, 128, 897988541, 6, 2, 0, 64, 1065353216>) custom_kernel_headrace_place_heads_q_k_q_norm_k_norm_periods_offset_last__float16_t_128_897988541_6_2_0_64_1065353216_float16_t_float16_t_float16_t_float16_t_float_int32_tc_float16_t_float16_t<float16_t, 128, 897988541, 6, 2, 0, 64, 1065353216>;

template <typename T, int D, int EPS, int Q_HEADS, int K_HEADS, int V_HEADS, int DIMS, int AMPLITUDE>
[[kernel]] void custom_kernel_headrace_place_heads_q_k_periods_offset_first__float16_t_128_897988541_6_2_0_128_1067869798_float16_t_float16_t_float_int32_tc_float16_t_float16_t(
  const device float16_t* q [[buffer(0)]],
  const constant int* q_shape [[buffer(1)]],
  const constant int64_t* q_strides [[buffer(2)]],
  const device float16_t* k [[buffer(3)]],
  const constant int64_t* k_strides [[buffer(4)]],
  const device float* periods [[buffer(5)]],
  const constant int64_t* periods_strides [[buffer(6)]],
  const constant int32_t* offset [[buffer(7)]],
  const constant int* offset_shape [[buffer(8)]],
  device float16_t* q_out [[buffer(9)]],
  device float16_t* k_out [[buffer(10)]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 thread_position_in_grid [[thread_position_in_grid]]) {

const int lane = thread_index_in_simdgroup;
const int head = thread_position_in_grid.y;
const int length = q_shape[1];
const int64_t batch = thread_position_in_grid.z / length;
const int64_t token = thread_position_in_grid.z % length;
float held[D / 32];

if (head >= 0 && head < 0 + Q_HEADS) {
  const int own = head - (0);
  for (int n = 0; n < D / 32; ++n) {
    const int i = own * D + lane + 32 * n;
    held[n] = float(q[batch * q_strides[0] + token * q_strides[1] + i * q_strides[2]]);
  }

  const float amplitude = as_type<float>(AMPLITUDE);
  const float position = float(offset[offset_shape[0] > 1 ? batch : 0] + token);
  for (int n = 0; n < DIMS / 64; ++n) {
    const float angle = position * (1.0f / periods[(lane + 32 * n) * periods_strides[0]]);
    const float cosine = metal::precise::cos(angle), sine = metal::precise::sin(angle);
    const float one = float(T(held[n] * amplitude)), other = float(T(held[n + DIMS / 64] * amplitude));
    held[n] = float(T(one * cosine - other * sine));
    held[n + DIMS / 64] = float(T(one * sine + other * cosine));
  }

  for (int n = 0; n < D / 32; ++n) {
    q_out[((batch * Q_HEADS + own) * length + token) * D + lane + 32 * n] = T(held[n]);
  }
}

if (head >= 0 + Q_HEADS && head < 0 + Q_HEADS + K_HEADS) {
  const int own = head - (0 + Q_HEADS);
  for (int n = 0; n < D / 32; ++n) {
    const int i = own * D + lane + 32 * n;
    held[n] = float(k[batch * k_strides[0] + token * k_strides[1] + i * k_strides[2]]);
  }

  const float amplitude = as_type<float>(AMPLITUDE);
  const float position = float(offset[offset_shape[0] > 1 ? batch : 0] + token);
  for (int n = 0; n < DIMS / 64; ++n) {
    const float angle = position * (1.0f / periods[(lane + 32 * n) * periods_strides[0]]);
    const float cosine = metal::precise::cos(angle), sine = metal::precise::sin(angle);
    const float one = float(T(held[n] * amplitude)), other = float(T(held[n + DIMS / 64] * amplitude));
    held[n] = float(T(one * cosine - other * sine));
    held[n + DIMS / 64] = float(T(one * sine + other * cosine));
  }

  for (int n = 0; n < D / 32; ++n) {
    k_out[((batch * K_HEADS + own) * length + token) * D + lane + 32 * n] = T(held[n]);
  }
}

}

template [[host_name("custom_kernel_headrace_place_heads_q_k_periods_offset_first__float16_t_128_897988541_6_2_0_128_1067869798_float16_t_float16_t_float_int32_tc_float16_t_float16_t")]] [[kernel]] decltype(custom_kernel_headrace_place_heads_q_k_periods_offset_first__float16_t_128_897988541_6_2_0_128_1067869798_float16_t_float16_t_float_int32_tc_float16_t_float16_t<float16_t, 128, 897988541, 6, 2, 0, 128, 1067869798>) custom_kernel_headrace_place_heads_q_k_periods_offset_first__float16_t_128_897988541_6_2_0_128_1067869798_float16_t_float16_t_float_int32_tc_float16_t_float16_t<float16_t, 128, 897988541, 6, 2, 0, 128, 1067869798>;

template <typename T, int D, int GROUPS, int WINDOW, int K_BITS, int K_GROUP, int V_BITS, int V_GROUP, int SCALE, int SOFTCAP>
[[kernel]] void custom_kernel_headrace_attend_codes_sinks__float16_t_128_32_0_8_64_8_64_1035489772_0_float16_t_uint32_t_float16_t_float16_t_uint32_t_float16_t_float16_t_float16_tc_float16_t(
  const device float16_t* q [[buffer(0)]],
  const constant int* q_shape [[buffer(1)]],
  const constant int64_t* q_strides [[buffer(2)]],
  const device uint32_t* k_codes [[buffer(3)]],
  const constant int* k_codes_shape [[buffer(4)]],
  const constant int64_t* k_codes_strides [[buffer(5)]],
  const device float16_t* k_scales [[buffer(6)]],
  const constant int64_t* k_scales_strides [[buffer(7)]],
  const device float16_t* k_offsets [[buffer(8)]],
  const constant int64_t* k_offsets_strides [[buffer(9)]],
  const device uint32_t* v_codes [[buffer(10)]],
  const constant int64_t* v_codes_strides [[buffer(11)]],
  const device float16_t* v_scales [[buffer(12)]],
  const constant int64_t* v_scales_strides [[buffer(13)]],
  const device float16_t* v_offsets [[buffer(14)]],
  const constant int64_t* v_offsets_strides [[buffer(15)]],
  const constant float16_t* sinks [[buffer(16)]],
  const constant int64_t* sinks_strides [[buffer(17)]],
  device float16_t* attended [[buffer(18)]],
  uint simdgroup_index_in_threadgroup [[simdgroup_index_in_threadgroup]],
  uint thread_index_in_simdgroup [[thread_index_in_simdgroup]],
  uint3 thread_position_in_threadgroup [[thread_position_in_threadgroup]],
  uint3 threadgroup_position_in_grid [[threadgroup_position_in_grid]]) {

const int lane = thread_index_in_simdgroup;
const int group = simdgroup_index_in_threadgroup;
const int head = threadgroup_position_in_grid.y;
const int length = q_shape[2];
const int64_t batch = threadgroup_position_in_grid.z / length;
const int token = threadgroup_position_in_grid.z % length;
const int64_t kv = head / (q_shape[1] / k_codes_shape[1]);
const int last = k_codes_shape[2] - length + token;
const int first = WINDOW > 0 ? metal::max(0, last - WINDOW + 1) : 0;
const float scale = as_type<float>(SCALE), softcap = as_type<float>(SOFTCAP);
float query[D / 32], held[D / 32];
for (int j = 0; j < D / 32; ++j) {
  const int i = lane * (D / 32) + j;
  const int64_t at = batch * q_strides[0] + head * q_strides[1] + token * q_strides[2] + i * q_strides[3];
  query[j] = float(T(float(q[at]) * scale));
  held[j] = 0.0f;
}
float best = -3.0e38f, sum = 0.0f;
if (group == 0) {
  best = float(sinks[head * sinks_strides[0]]);
  sum = 1.0f;
}
for (int64_t n = first + group; n <= last; n += GROUPS) {
  float score = 0.0f;
  for (int j = 0; j < D / 32; ++j) {
    const int i = lane * (D / 32) + j;
    score += query[j] * (float(k_scales[batch * k_scales_strides[0] + kv * k_scales_strides[1] + n * k_scales_strides[2] + i / K_GROUP * k_scales_strides[3]]) * float((k_codes[batch * k_codes_strides[0] + kv * k_codes_strides[1] + n * k_codes_strides[2] + i * K_BITS / 32] >> (i * K_BITS % 32) | (i * K_BITS % 32 + K_BITS > 32 ? k_codes[batch * k_codes_strides[0] + kv * k_codes_strides[1] + n * k_codes_strides[2] + i * K_BITS / 32 + 1] << (32 - i * K_BITS % 32) : 0u)) & ((1u << K_BITS) - 1)) + float(k_offsets[batch * k_offsets_strides[0] + kv * k_offsets_strides[1] + n * k_offsets_strides[2] + i / K_GROUP * k_offsets_strides[3]]));
  }
  score = simd_sum(score);
  score = SOFTCAP != 0 ? metal::precise::tanh(score / softcap) * softcap : score;
  const float most = metal::max(best, score);
  const float kept = metal::precise::exp(best - most), weight = metal::precise::exp(score - most);
  best = most;
  sum = sum * kept + weight;
  for (int j = 0; j < D / 32; ++j) {
    const int i = lane * (D / 32) + j;
    held[j] = held[j] * kept + weight * (float(v_scales[batch * v_scales_strides[0] + kv * v_scales_strides[1] + n * v_scales_strides[2] + i / V_GROUP * v_scales_strides[3]]) * float((v_codes[batch * v_codes_strides[0] + kv * v_codes_strides[1] + n * v_codes_strides[2] + i * V_BITS / 32] >> (i * V_BITS % 32) | (i * V_BITS % 32 + V_BITS > 32 ? v_codes[batch * v_codes_strides[0] + kv * v_codes_strides[1] + n * v_codes_strides[2] + i * V_BITS / 32 + 1] << (32 - i * V_BITS % 32) : 0u)) & ((1u << V_BITS) - 1)) + float(v_offsets[batch * v_offsets_strides[0] + kv * v_offsets_strides[1] + n * v_offsets_strides[2] + i / V_GROUP * v_offsets_strides[3]]));
  }
}

threadgroup float bests[GROUPS];
threadgroup float sums[GROUPS];
threadgroup float parts[GROUPS * D];
if (lane == 0) {
  bests[group] = best;
  sums[group] = sum;
}
for (int j = 0; j < D / 32; ++j) {
  parts[group * D + lane * (D / 32) + j] = held[j];
}
threadgroup_barrier(mem_flags::mem_threadgroup);
float most = bests[0], total = 0.0f;
for (int g = 1; g < GROUPS; ++g) {
  most = metal::max(most, bests[g]);
}
for (int g = 0; g < GROUPS; ++g) {
  total += sums[g] * metal::precise::exp(bests[g] - most);
}
for (int i = thread_position_in_threadgroup.x; i < D; i += 32 * GROUPS) {
  float merged = 0.0f;
  for (int g = 0; g < GROUPS; ++g) {
    merged += parts[g * D + i] * metal::precise::exp(bests[g] - most);
  }
  attended[((batch * q_shape[1] + head) * length + token) * D + i] = T(merged / total);
}

}

template [[host_name("custom_kernel_headrace_attend_codes_sinks__float16_t_128_32_0_8_64_8_64_1035489772_0_float16_t_uint32_t_float16_t_float16_t_uint32_t_float16_t_float16_t_float16_tc_float16_t")]] [[kernel]] decltype(custom_kernel_headrace_attend_codes_sinks__float16_t_128_32_0_8_64_8_64_1035489772_0_float16_t_uint32_t_float16_t_float16_t_uint32_t_float16_t_float16_t_float16_tc_float16_t<float16_t, 128, 32, 0, 8, 64, 8, 64, 1035489772, 0>) custom_kernel_headrace_attend_codes_sinks__float16_t_128_32_0_8_64_8_64_1035489772_0_float16_t_uint32_t_float16_t_float16_t_uint32_t_float16_t_float16_t_float16_tc_float16_t<float16_t, 128, 32, 0, 8, 64, 8, 64, 1035489772, 0>;
