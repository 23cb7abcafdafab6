// Attention against a plain softmax in double precision: grouped heads, windows, chunks, caps, learned sinks, norms, rotation, growth,
// rows without values or keys, what it leaves in the cache, and caches that have dropped what no query sees. Decode is one way through
// the code, prefill another, over K/V in half precision a third.
#include <cmath>
#include <cstring>

#include "../core/attend.h"
#include "attention_bounds.h"
#include "checks.h"

namespace headrace::tests {
namespace {

struct Case {
  // length: new tokens, from position `offset` on, of each of `batch` sequences; spare: rows of the buffers behind the last one. The others
  // are AttendCall's.
  int64_t batch = 1, length = 1, heads = 6, kv_heads = 2, dim = 48, offset = 0, window = 0, spare = 0;
  Type type = Type::f16;
  float softcap = 0;
  bool norms = false, all = false, last = false;  // of queries and keys; of all heads together; behind the rotation
  bool value_norm = false;
  int64_t parts = 3;  // as AttendCall's
  float growth = 0;   // every 16 positions
  int64_t rotated = 0;  // dimensions; 0: no rotation
  double loud = 1;  // what queries are multiplied with
  double sink = 0;  // score of the first entry with every query, where it is not 0; its value is 0,
  bool valued = false;  // or, if that, 0 but in the first column
  bool learned = false;  // every head has a score beside its entries'
  int64_t dropped = 0;   // entries that the cache has no rows for any more: no query may see them
  Phase phase = length > 4 ? Phase::prefill : Phase::decode;
  bool chunked = false;  // the window is a chunk
};

// The first number of every query meets the first entry's key, and no other. Other entries' values are 1 on average, so
// that those in other blocks come to something even where each has a weight that would be 0 if rounded beside the sink's.
void make_sink(const Case& c, std::vector<float>& projected, std::vector<float>& keys, std::vector<float>& values) {
  const int64_t all_heads = c.heads + 2 * c.kv_heads;
  for (int64_t i = 0; i < c.batch * c.length * all_heads; ++i) {
    projected[i * c.dim] = i % all_heads < c.heads ? 8.0f : i % all_heads < c.heads + c.kv_heads ? 0.0f : 1.0f;
  }
  for (float& value : values) value += 1;
  const int64_t capacity = c.offset + c.length + c.spare;
  for (int64_t i = 0; i < c.batch * c.kv_heads * capacity; ++i) {
    float* key = keys.data() + i * c.dim;
    key[0] = 0;
    if (i % capacity != 0) continue;
    std::fill(key, key + c.dim, 0.0f);
    key[0] = static_cast<float>(c.sink / 0.8);
    std::fill(values.data() + i * c.dim, values.data() + (i + 1) * c.dim, 0.0f);
    if (c.valued) values[i * c.dim] = 1;
  }
}

// n numbers divided by their root mean square, times `norm`.
void normalize(double* row, int64_t n, const float* norm) {
  double squares = 0;
  for (int64_t i = 0; i < n; ++i) squares += row[i] * row[i];
  const double factor = 1 / std::sqrt(squares / static_cast<double>(n) + 1e-6);
  for (int64_t i = 0; i < n; ++i) row[i] *= factor * norm[i];
}

// The h-th of `heads` heads as it should be attended with: normalised and rotated, if the case asks for it.
std::vector<double> placed(const Case& c, const float* row, int64_t heads, int64_t h, const std::vector<float>& norm,
                           int64_t position) {
  std::vector<double> all(row, row + heads * c.dim);
  if (c.norms && c.all) normalize(all.data(), heads * c.dim, norm.data());
  std::vector<double> out(all.begin() + h * c.dim, all.begin() + (h + 1) * c.dim);
  if (c.norms && !c.all && !c.last) normalize(out.data(), c.dim, norm.data());
  for (int64_t i = 0; i < c.rotated / 2; ++i) {
    const float angle = static_cast<float>(position) * (1.0f / static_cast<float>(i + 1));  // rounded as rope.cpp does
    const double a = out[i], b = out[i + c.rotated / 2];
    out[i] = a * std::cos(double{angle}) - b * std::sin(double{angle});
    out[i + c.rotated / 2] = b * std::cos(double{angle}) + a * std::sin(double{angle});
  }
  if (c.norms && c.last) normalize(out.data(), c.dim, norm.data());
  return out;
}

// Whether products were taken in integers.
bool rounded(const Case& c, const Kernels& kernels) {
  return kernels.rounds_attention && c.type != Type::f32 && c.phase == Phase::prefill;
}

// Buffers (B, Hkv, capacity, D), whose first row is position `first`, as blocks.
class Contiguous {
 public:
  Contiguous(AttendCall& call, char* keys, const char* values, int64_t capacity, int64_t first = 0)
      : call_(call), keys_(keys), first_(first), row_bytes_(call.dim * size_of(call.kv_type)) {
    call.keys_at = 0;
    call.values_at = values - keys;
    call.head_bytes = capacity * row_bytes_;
  }

  // `length` tokens of each of `batch` sequences from `offset` on.
  void rows(int64_t batch, int64_t length, int64_t offset, Phase phase) {
    sequences_.clear();
    blocks_.assign(static_cast<size_t>(batch), {});
    for (int64_t b = 0; b < batch; ++b) {
      char* base = keys_ + b * call_.kv_heads * call_.head_bytes;
      for (int64_t at = 0; at < offset + length; at += kBlock) blocks_[b].push_back(base + (at - first_) * row_bytes_);
      sequences_.push_back({b * length, length, offset, phase, blocks_[b].data(), first_});
    }
    call_.sequences = sequences_.data();
    call_.count = batch;
  }

 private:
  AttendCall& call_;
  char* keys_;
  int64_t first_, row_bytes_;
  std::vector<std::vector<char*>> blocks_;
  std::vector<SequenceRows> sequences_;
};

// The output `got` (D) of token t's query q, over entries that begin at row `base` of keys and values.
void check_output(const Case& c, const AttendCall& call, const Kernels& kernels, const std::vector<double>& q,
                  const float* learned, int64_t base, int64_t t, const Guarded& keys, const Guarded& values,
                  const float* got) {
  const int64_t position = c.offset + t, since = c.chunked ? position % c.window : c.window > 0 ? c.window - 1 : position;
  const int64_t first = std::max<int64_t>(0, position - since), count = position + 1 - first;
  std::vector<double> numbers(static_cast<size_t>(count * c.dim)), expected(static_cast<size_t>(c.dim), 0.0);
  std::vector<Seen> seen(static_cast<size_t>(count));
  double top = learned == nullptr ? -1e30 : *learned;
  for (int64_t i = 0; i < count; ++i) {
    Seen& entry = seen[i];
    entry = {0, 0, 0, numbers.data() + i * c.dim};
    for (int64_t d = 0; d < c.dim; ++d) {
      const double key = number(keys.as(), c.type, (base + first + i) * c.dim + d);
      const double value = number(values.as(), c.type, (base + first + i) * c.dim + d);
      entry.weight += 0.1 * q[d] * key;
      entry.key_length += key * key;
      entry.largest_value = std::max(entry.largest_value, std::fabs(value));
      numbers[i * c.dim + d] = value;
    }
    entry.key_length = std::sqrt(entry.key_length);
    if (c.softcap > 0) entry.weight = c.softcap * std::tanh(entry.weight / c.softcap);
    top = std::max(top, entry.weight);
  }
  double total = learned == nullptr ? 0 : std::exp(*learned - top);
  for (Seen& entry : seen) total += entry.weight = std::exp(entry.weight - top);
  for (Seen& entry : seen) {
    entry.weight /= total;
    for (int64_t d = 0; d < c.dim; ++d) expected[d] += entry.weight * entry.value[d];
  }
  std::vector<double> bounds(static_cast<size_t>(c.dim), 2e-5 * c.loud);
  if (rounded(c, kernels)) bounds = rounding_bounds(seen, q, 0.1, expected);
  for (int64_t d = 0; d < c.dim; ++d) {
    if (!(std::fabs(got[d] - expected[d]) <= bounds[d])) return check(false, "attention", kernels.name);
  }
}

// A case against the oracle: what the cache has afterwards (stored keys and values), and each query's output.
void test_case(const Kernels& kernels, const Case& c) {
  const int64_t all_heads = c.heads + (c.parts - 1) * c.kv_heads, capacity = c.offset + c.length + c.spare - c.dropped;
  const int64_t entries = c.batch * c.kv_heads * capacity;
  auto projected = random_floats(c.batch * c.length * all_heads * c.dim);
  auto key_numbers = random_floats(entries * c.dim), value_numbers = random_floats(entries * c.dim);
  for (int64_t i = 0; i < c.batch * c.length * all_heads * c.dim; ++i) {
    if (i / c.dim % all_heads < c.heads) projected[i] *= static_cast<float>(c.loud);
  }
  if (c.sink != 0) make_sink(c, projected, key_numbers, value_numbers);
  const auto q_norms = random_floats((c.all ? c.heads : 1) * c.dim), k_norms = random_floats((c.all ? c.kv_heads : 1) * c.dim);
  const auto v_norms = random_floats(c.dim);
  const auto scores = random_floats(c.learned ? c.heads : 0);
  const Guarded qkv = guarded(projected), q_norm = guarded(q_norms), k_norm = guarded(k_norms), sinks = guarded(scores);
  Guarded keys = stored(key_numbers, c.type), values = stored(value_numbers, c.type);
  Guarded out(c.batch * c.length * c.heads * c.dim * 4);
  std::vector<float> periods;
  for (int64_t i = 0; i < c.rotated / 2; ++i) periods.push_back(static_cast<float>(i + 1));
  Rope rope(periods, 1.0f);

  AttendCall call;
  call.qkv = qkv.as<float>();
  call.kv_type = c.type;
  call.heads = c.heads;
  call.kv_heads = c.kv_heads;
  call.dim = c.dim;
  call.norm_eps = 1e-6f;
  call.rule = {0.1f, c.softcap};
  call.window = c.window;
  call.chunked = c.chunked;
  if (c.learned) call.sinks = sinks.as<float>();
  call.out = out.as<float>();
  if (c.norms) {
    call.q_norm = q_norm.as<float>();
    call.k_norm = k_norm.as<float>();
    call.norm_all = c.all;
    call.norm_last = c.last;
  }
  if (c.value_norm) call.v_norm = v_norms.data();
  call.parts = c.parts;
  call.growth = c.growth;
  call.growth_length = 16;
  if (c.rotated > 0) call.rope = &rope;
  Contiguous buffers(call, keys.as<char>(), values.as<char>(), capacity, c.dropped);
  buffers.rows(c.batch, c.length, c.offset, c.phase);
  run_attend(Pool::shared(), kernels, call);

  const double half_ulp = c.type == Type::f32 ? 2e-6 : c.type == Type::f16 ? 0x1p-11 : 0x1p-8;
  for (int64_t b = 0; b < c.batch; ++b) {
    for (int64_t t = 0; t < c.length; ++t) {
      const float* token = projected.data() + (b * c.length + t) * all_heads * c.dim;
      for (int64_t h = 0; h < c.kv_heads && c.parts > 1; ++h) {  // what was written
        const auto key = placed(c, token + c.heads * c.dim, c.kv_heads, h, k_norms, c.offset + t);
        const float* from = token + (c.heads + (c.parts - 2) * c.kv_heads + h) * c.dim;
        std::vector<double> value(from, from + c.dim);
        if (c.value_norm) normalize(value.data(), c.dim, v_norms.data());
        const int64_t at = ((b * c.kv_heads + h) * capacity + c.offset + t - c.dropped) * c.dim;
        for (int64_t d = 0; d < c.dim; ++d) {
          const double key_off = number(keys.as(), c.type, at + d) - key[d];
          const double value_off = number(values.as(), c.type, at + d) - value[d];
          check(std::fabs(key_off) <= 1.01 * half_ulp * std::fabs(key[d]) + 1e-5, "stored key", kernels.name);
          check(std::fabs(value_off) <= 1.01 * half_ulp * std::fabs(value[d]) + 1e-7, "stored value", kernels.name);
        }
      }
      for (int64_t h = 0; h < c.heads; ++h) {
        auto q = placed(c, token, c.heads, h, q_norms, c.offset + t);
        for (double& value : q) value *= 1 + c.growth * std::log1p(static_cast<double>((c.offset + t) / 16));
        const int64_t base = (b * c.kv_heads + h / (c.heads / c.kv_heads)) * capacity - c.dropped;
        const float* got = out.as<float>() + ((b * c.length + t) * c.heads + h) * c.dim;
        check_output(c, call, kernels, q, c.learned ? &scores[h] : nullptr, base, t, keys, values, got);
      }
    }
  }
}

// Of `spoiled` (query, key or value) one number of the last token is not finite: nor is what that token makes of it.
void test_spoiled(const Kernels& kernels, Type type, Phase phase, int64_t spoiled, float with, float softcap) {
  constexpr int64_t kLength = 9, kDim = 32;
  auto projected = random_floats(kLength * 3 * kDim);
  projected[((kLength - 1) * 3 + spoiled) * kDim + 5] = with;
  const Guarded qkv = guarded(projected);
  Guarded keys = stored(random_floats(kLength * kDim), type), values = stored(random_floats(kLength * kDim), type);
  Guarded out(kLength * kDim * 4);
  AttendCall call;
  call.qkv = qkv.as<float>();
  call.kv_type = type;
  call.heads = call.kv_heads = 1;
  call.dim = kDim;
  call.rule.softcap = softcap;
  call.out = out.as<float>();
  Contiguous buffers(call, keys.as<char>(), values.as<char>(), kLength);
  buffers.rows(1, kLength, 0, phase);
  run_attend(Pool::shared(), kernels, call);
  bool finite = true;
  for (int64_t d = 0; d < kDim; ++d) finite = finite && std::isfinite(out.as<float>()[(kLength - 1) * kDim + d]);
  check(!finite, "what is not finite shows", kernels.name);
}

// A query's result has the same bits however many threads share its chunks, and whether it is alone or one of several.
void test_same_bits(const Kernels& kernels, Phase phase, Type type, int64_t window, bool chunked = false, int64_t length = 9) {
  constexpr int64_t kHeads = 6, kKvHeads = 2, kDim = 64, kOffset = 1274;
  const int64_t capacity = kOffset + length;
  constexpr int64_t kRow = (kHeads + 2 * kKvHeads) * kDim;
  const auto projected = random_floats(length * kRow), numbers = random_floats(kKvHeads * capacity * kDim);
  const Guarded qkv = guarded(projected);
  Guarded keys = stored(numbers, type), values = stored(numbers, type);
  AttendCall call;
  call.kv_type = type;
  call.heads = kHeads;
  call.kv_heads = kKvHeads;
  call.dim = kDim;
  call.rule = {0.1f, 0};
  call.window = window;
  call.chunked = chunked;
  Contiguous buffers(call, keys.as<char>(), values.as<char>(), capacity);
  const auto attended = [&](int threads, bool together) {
    Pool::shared().set_threads(threads);
    std::vector<float> out(length * kHeads * kDim);
    for (int64_t t = 0; t < length; t += together ? length : 1) {
      call.qkv = qkv.as<float>() + t * kRow;
      buffers.rows(1, together ? length : 1, kOffset + t, phase);
      call.out = out.data() + t * kHeads * kDim;
      run_attend(Pool::shared(), kernels, call);
    }
    return out;
  };
  const int threads = Pool::shared().threads();
  const auto expected = attended(1, true);
  for (const int other : {1, 2, 7}) {
    check(attended(other, false) == expected && attended(other, true) == expected, "the same bits", kernels.name);
  }
  Pool::shared().set_threads(threads);
}

// Sequences of different lengths and phases in one pass, their blocks anywhere, the long ones with the same first one: each as
// it would be alone in one piece.
void test_ragged(const Kernels& kernels, Type type, int64_t window, bool learned, bool chunked = false) {
  constexpr int64_t kHeads = 6, kKvHeads = 2, kDim = 48, kRow = (kHeads + 2 * kKvHeads) * kDim, kLayers = 3, kLayer = 1;
  struct Sequence {
    int64_t count, offset;
    Phase phase;
  };
  const std::vector<Sequence> sequences = {{1, 0, Phase::decode},    {1, 127, Phase::decode},  {70, 0, Phase::prefill},
                                           {1, 900, Phase::decode},  {9, 600, Phase::decode},  {1, 260, Phase::prefill},
                                           {100, 500, Phase::prefill}, {1, 128, Phase::decode}};
  std::vector<float> periods(kDim / 2);
  for (int64_t i = 0; i < kDim / 2; ++i) periods[i] = static_cast<float>(1 + i);
  Rope rope(periods, 1.0f);
  const auto sinks = random_floats(kHeads);
  AttendCall call;
  call.kv_type = type;
  call.heads = kHeads;
  call.kv_heads = kKvHeads;
  call.dim = kDim;
  call.rule = {0.1f, 0};
  call.window = window;
  call.chunked = chunked;
  call.rope = &rope;
  if (learned) call.sinks = sinks.data();
  const int64_t row_bytes = kDim * size_of(type), head_bytes = kBlock * row_bytes, half = kKvHeads * head_bytes;

  int64_t rows = 0, capacity = 0;
  for (const Sequence& s : sequences) rows += s.count, capacity = std::max(capacity, s.offset + s.count);
  const auto projected = random_floats(rows * kRow), past = random_floats(2 * kKvHeads * capacity * kDim);
  const Guarded qkv = guarded(projected);
  Guarded out(rows * kHeads * kDim * 4);
  std::vector<Guarded> memory;
  std::vector<std::vector<char*>> tables;
  std::vector<SequenceRows> shared_out;
  std::vector<float> expected;
  char* prefix = nullptr;  // a block that all long ones have
  int64_t row = 0;
  for (const Sequence& s : sequences) {
    Guarded keys = stored({past.begin(), past.begin() + kKvHeads * capacity * kDim}, type);
    Guarded values = stored({past.begin() + kKvHeads * capacity * kDim, past.end()}, type);
    std::vector<char*> table;
    for (int64_t at = 0; at < s.offset + s.count; at += kBlock) {
      if (at == 0 && s.offset > kBlock && prefix != nullptr) {
        table.push_back(prefix);
        continue;
      }
      memory.emplace_back(kLayers * 2 * half);
      std::memset(memory.back().as(), 0xff, static_cast<size_t>(kLayers * 2 * half));  // NaN
      table.push_back(memory.back().as<char>());
      if (at == 0 && s.offset > kBlock) prefix = table[0];
      for (int64_t h = 0; h < kKvHeads; ++h) {
        const int64_t n = std::clamp<int64_t>(s.offset - at, 0, kBlock) * row_bytes;
        char* to = table.back() + 2 * kLayer * half + h * head_bytes;
        std::memcpy(to, keys.as<char>() + (h * capacity + at) * row_bytes, static_cast<size_t>(n));
        std::memcpy(to + half, values.as<char>() + (h * capacity + at) * row_bytes, static_cast<size_t>(n));
      }
    }
    // No row sees what has left the window.
    for (int64_t i = 0; i < first_seen(call, s.offset) / kBlock; ++i) table[i] = nullptr;
    tables.push_back(std::move(table));
    shared_out.push_back({row, s.count, s.offset, s.phase, tables.back().data(), 0});

    call.qkv = qkv.as<float>() + row * kRow;
    std::vector<float> alone(static_cast<size_t>(s.count * kHeads * kDim));
    call.out = alone.data();
    Contiguous buffers(call, keys.as<char>(), values.as<char>(), capacity);
    buffers.rows(1, s.count, s.offset, s.phase);
    run_attend(Pool::shared(), kernels, call);
    expected.insert(expected.end(), alone.begin(), alone.end());
    row += s.count;
  }
  call.qkv = qkv.as<float>();
  call.out = out.as<float>();
  call.sequences = shared_out.data();
  call.count = static_cast<int64_t>(shared_out.size());
  call.keys_at = 2 * kLayer * half;
  call.values_at = call.keys_at + half;
  call.head_bytes = head_bytes;
  const int threads = Pool::shared().threads();
  for (const int other : {1, 3}) {
    Pool::shared().set_threads(other);
    run_attend(Pool::shared(), kernels, call);
    check(std::memcmp(out.as(), expected.data(), expected.size() * sizeof(float)) == 0, "alone as among others", kernels.name);
  }
  for (const int64_t wanted : {int64_t{0}, shared_out[4].row}) {  // of other rows nothing is computed
    call.wanted = wanted;
    std::memset(out.as(), 0xff, static_cast<size_t>(rows * kHeads * kDim) * sizeof(float));
    run_attend(Pool::shared(), kernels, call);
    const float* got = out.as<float>();
    const int64_t end = wanted * kHeads * kDim;
    check(std::memcmp(got, expected.data(), static_cast<size_t>(end) * sizeof(float)) == 0, "wanted rows", kernels.name);
    for (int64_t i = end; i < rows * kHeads * kDim; ++i) check(std::isnan(got[i]), "other rows", kernels.name);
  }
  Pool::shared().set_threads(threads);
}

}  // namespace

void test_attention(const Kernels& kernels) {
  constexpr Type kTypes[] = {Type::f32, Type::f16, Type::bf16};
  int turn = 0;
  for (const Type type : kTypes) {
    for (const int64_t length : {1, 2, 4, 5, 49}) {
      for (const int64_t offset : {0, 1, 127, 150}) {
        for (const int64_t window : {0, 1, 40}) {
          test_case(kernels, {.length = length, .offset = offset, .window = window, .spare = turn++ % 2, .type = type});
        }
      }
    }
  }
  for (const int64_t dim : {16, 64, 80, 112, 128, 256}) {
    for (const int64_t kv_heads : {1, 2}) {
      for (const int64_t shared : {1, 3, 4, 7}) {
        for (const int64_t length : {1, 3, 9}) {
          test_case(kernels, {.batch = 2,
                              .length = length,
                              .heads = kv_heads * shared,
                              .kv_heads = kv_heads,
                              .dim = dim,
                              .offset = 70,
                              .spare = 3,
                              .type = kTypes[turn++ % 3],
                              .softcap = turn % 2 == 0 ? 0.0f : 5.0f,
                              .norms = turn % 3 == 0,
                              .rotated = turn % 4 == 0 ? dim / 2 : dim});
        }
      }
    }
  }
  for (const Type type : kTypes) {  // other norms and parts of a token's row, as Gemma 4, OLMo and Llama 4 have them
    for (const int64_t length : {1, 9, 70}) {
      const Case c{.length = length, .offset = 70, .type = type, .rotated = 32};
      for (const int64_t parts : {1, 2, 3}) {
        for (const bool norms : {false, true}) {
          Case other = c;
          other.parts = parts;
          other.norms = norms;
          other.value_norm = parts > 1;
          test_case(kernels, other);
        }
      }
      Case normed = c;
      normed.norms = true;
      normed.growth = 0.3f;
      for (const bool all : {true, false}) {
        normed.all = all;
        normed.last = !all;
        test_case(kernels, normed);
      }
    }
  }
  for (const Type type : kTypes) {
    for (const Phase phase : {Phase::prefill, Phase::decode}) {
      const bool rounds = phase == Phase::prefill && kernels.rounds_attention && type != Type::f32;
      for (const int64_t spoiled : {0, 1, 2}) {
        for (const float softcap : {0.0f, 5.0f}) test_spoiled(kernels, type, phase, spoiled, std::nanf(""), softcap);
        // Of an infinite key or query a score may be -inf, without weight.
        if (rounds || spoiled == 2) test_spoiled(kernels, type, phase, spoiled, INFINITY, 0);
      }
    }
  }
  for (const Type type : kTypes) {
    for (const int64_t length : {1, 4, 9, 70}) {
      for (const int64_t dropped : {0, 60, 111}) {  // the last: all that the first query does not see
        const Case c{.length = length, .offset = 150, .window = 40, .spare = turn++ % 2, .type = type, .dropped = dropped};
        test_case(kernels, c);
        Case learned = c;
        learned.learned = true;
        test_case(kernels, learned);
      }
      test_case(kernels, {.batch = 2, .length = length, .offset = 300, .type = type, .learned = true});
    }
  }
  for (const int64_t window : {0, 100, 700}) {
    for (const Type type : {Type::f16, Type::f32}) {
      for (const Phase phase : {Phase::prefill, Phase::decode}) {
        test_same_bits(kernels, phase, type, window);
        if (window > 0) test_same_bits(kernels, phase, type, 1280 - window % 3, true);  // the rows cross its edge
      }
    }
  }
  for (const int64_t window : {0, 100}) {  // rows of several groups of lanes
    test_same_bits(kernels, Phase::prefill, Type::f16, window, false, 40);
  }
  for (const Type type : kTypes) {
    for (const int64_t length : {1, 3}) {
      for (const int64_t window : {0, 30}) {
        test_case(kernels, {.length = length, .offset = 150, .window = window, .type = type, .phase = Phase::prefill});
      }
    }
    test_case(kernels, {.length = 12, .offset = 150, .type = type, .phase = Phase::decode});
  }
  for (const Type type : kTypes) {
    for (const int64_t window : {0, 200}) test_ragged(kernels, type, window, window == 0);
    test_ragged(kernels, type, 130, false, true);
    for (const int64_t length : {1, 3, 9, 70}) {
      for (const int64_t chunk : {1, 16, 100, 153, 400}) {
        test_case(kernels, {.length = length, .offset = 150, .window = chunk, .type = type, .chunked = true});
      }
    }
  }
  // Long enough for every thread to have several chunks.
  for (const int64_t length : {1, 100}) test_case(kernels, {.length = length, .offset = 1500, .rotated = 48});
  for (const Type type : kTypes) {
    for (const int64_t length : {7, 20}) {
      test_case(kernels, {.length = length, .offset = 400, .type = type, .loud = 20});  // scores to 50
      for (const double sink : {3, 9, 12, 15}) {
        for (const bool valued : {false, true}) {
          test_case(kernels, {.length = length, .offset = 900, .type = type, .sink = sink, .valued = valued});
        }
      }
    }
  }
}

}  // namespace headrace::tests
