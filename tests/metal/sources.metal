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
