// Packed K/V: what is written and read back, and attention over it against a plain softmax in double precision of the numbers that
// the codes stand for. Every width, group and size, in both phases; beside attention sinks and channels far larger than others.
#include <cmath>
#include <cstring>
#include <limits>

#include "../core/attend.h"
#include "attention_bounds.h"
#include "checks.h"

namespace headrace::tests {
namespace {

struct Case {
  Packings packings;
  int64_t length = 1, heads = 6, kv_heads = 2, dim = 64, offset = 0, window = 0;
  float softcap = 0;
  bool sink = false;     // the first entry has nearly all the weight, and next to no value
  bool outliers = false;  // some channels of keys and values are far from 0, and large
  bool learned = false;   // heads have attention sinks without values
  Phase phase = length > 4 ? Phase::prefill : Phase::decode;
};

// One sequence's blocks of one layer, of exactly their size; what no entry was written to is 255 in every byte.
class Blocks {
 public:
  Blocks(AttendCall& call, const Packings& packings, int64_t entries) : call_(call) {
    call.packings = packings;
    call.keys_at = 0;
    call.values_at = PackedPart(packings.keys, call.dim).bytes;
    call.head_bytes = call.values_at + PackedPart(packings.values, call.dim).bytes;
    for (int64_t at = 0; at < entries; at += kBlock) {
      memory_.emplace_back(call.kv_heads * call.head_bytes);
      std::memset(memory_.back().as(), 0xff, static_cast<size_t>(call.kv_heads * call.head_bytes));
      table_.push_back(memory_.back().as<char>());
    }
  }

  void write(const Kernels& kernels, int64_t head, int64_t position, const float* key, const float* value) {
    char* to = table_[position / kBlock] + head * call_.head_bytes;
    kernels.pack_key(key, call_.dim, call_.packings.keys, position % kBlock, to);
    kernels.pack_value(value, call_.dim, call_.packings.values, position % kBlock, to + call_.values_at);
  }

  // (entries, D) of one head.
  void read(const Kernels& kernels, int64_t head, int64_t entries, std::vector<float>& keys, std::vector<float>& values) const {
    const int64_t dim = call_.dim, tiles = (entries + kTile - 1) / kTile * kTile;
    keys.resize(static_cast<size_t>(tiles * dim));
    values.resize(static_cast<size_t>(tiles * dim));
    for (int64_t at = 0; at < entries; at += kBlock) {
      const char* from = table_[at / kBlock] + head * call_.head_bytes;
      const int64_t n = std::min(kBlock, tiles - at);
      kernels.unpack_keys(from, dim, call_.packings.keys, 0, n, keys.data() + at * dim);
      kernels.unpack_values(from + call_.values_at, dim, call_.packings.values, 0, n, values.data() + at * dim);
    }
  }

  void rows(int64_t length, int64_t offset, Phase phase) {
    rows_ = {0, length, offset, phase, table_.data(), 0};
    call_.sequences = &rows_;
    call_.count = 1;
  }

 private:
  AttendCall& call_;
  std::vector<Guarded> memory_;
  std::vector<char*> table_;
  SequenceRows rows_;
};

void shape(std::vector<float>& numbers, const Case& c, int64_t dim, bool values) {
  const auto rows = static_cast<int64_t>(numbers.size()) / dim;
  for (int64_t i = 0; i < rows; ++i) {
    float* row = numbers.data() + i * dim;
    if (c.outliers) row[3] += 40, row[dim - 2] -= 25;
    if (c.sink && i % (rows / c.kv_heads) == 0) {
      for (int64_t d = 0; d < dim; ++d) row[d] = values ? row[d] * 1e-3f : 4.0f;
    }
  }
}

// Each number that was packed is within half a step of its group.
void check_codes(const Kernels& kernels, const Packing& packing, int64_t dim, const float* wanted, const float* got) {
  for (int64_t begin = 0; begin < dim; begin += packing.group) {
    const int64_t end = std::min(dim, begin + packing.group);
    const double below = 1 << (packing.bits - 1), above = below - 1;  // codes
    double largest = 0, step = 0;
    for (int64_t d = begin; d < end; ++d) {
      largest = std::max<double>(largest, std::fabs(wanted[d]));
      step = std::max<double>(step, wanted[d] > 0 ? wanted[d] / above : -wanted[d] / below);
    }
    step += largest * 0x1p-10 / above;
    for (int64_t d = begin; d < end; ++d) {
      const double off = std::fabs(double{got[d]} - wanted[d]);
      check(off <= step * (0.5 + 0x1p-9) + largest * 1e-6 + 3e-8, "packed number", kernels.name);
    }
  }
}

// The Hadamard transform of a head in double precision, from the matrix's definition.
template <class Number>
std::vector<double> transformed(const Number* x, int64_t dim) {
  const int64_t size = dim & -dim;
  std::vector<double> out(static_cast<size_t>(dim), 0.0);
  for (int64_t i = 0; i < dim; ++i) {
    for (int64_t j = 0; j < size; ++j) {
      const bool minus = __builtin_popcountll(static_cast<uint64_t>(i % size & j)) % 2 != 0;
      out[i] += (minus ? -1.0 : 1.0) * x[i / size * size + j] / std::sqrt(static_cast<double>(size));
    }
  }
  return out;
}

// Bounds of a head's errors after the transform, which keeps the length of each part.
std::vector<double> transformed_bounds(const std::vector<double>& bounds) {
  const auto dim = static_cast<int64_t>(bounds.size()), size = dim & -dim;
  std::vector<double> out(bounds.size(), 0.0);
  for (int64_t i = 0; i < dim; ++i) {
    for (int64_t j = 0; j < size; ++j) out[i] = std::hypot(out[i], bounds[i / size * size + j]);
  }
  return out;
}

// What decode rounds: a query to 16 bits, which moves all scores; what entries add, to 15 bits of the largest of a chunk.
std::vector<double> decode_bounds(const Case& c, const std::vector<Seen>& seen, const std::vector<double>& q,
                                  const std::vector<float>& keys, int64_t first, const std::vector<double>& out) {
  double largest = 0, moved = 0;
  for (const double v : q) largest = std::max(largest, std::fabs(v));
  const auto entries = static_cast<int64_t>(seen.size());
  for (int64_t i = 0; i < entries; ++i) {
    double sum = 0, products = 0;
    for (int64_t d = 0; d < c.dim; ++d) {
      sum += std::fabs(keys[(first + i) * c.dim + d]);
      products += std::fabs(q[d] * keys[(first + i) * c.dim + d]);
    }
    moved = std::max(moved, 0.1 * (sum * largest / 65534 + products * 4e-7));
  }
  std::vector<double> bounds(out.size(), 0.0);
  for (int64_t i = 0; i < entries; ++i) {
    for (size_t d = 0; d < out.size(); ++d) bounds[d] += 2 * moved * seen[i].weight * std::fabs(seen[i].value[d] - out[d]);
  }
  // In a chunk: half a unit for every entry, which is weighed with its code.
  const double codes = (1 << (c.packings.values.bits - 1)) - 1;
  for (int64_t i = 0; i < entries;) {
    const int64_t end = std::min(entries, ((first + i) / kBlock + 1) * kBlock - first);
    double added = 0, weights = 0;
    const int64_t count = end - i;
    for (; i < end; ++i) {
      added = std::max(added, seen[i].weight * 2 * seen[i].largest_value / codes * 1.01);
      weights += seen[i].weight * seen[i].largest_value;
    }
    for (double& bound : bounds) bound += 0.5 * added / 32767 * codes * static_cast<double>(count) + 2e-6 * weights;
  }
  for (double& bound : bounds) bound += 1e-6;
  return bounds;
}

void test_case(const Kernels& kernels, const Case& c) {
  const int64_t all_heads = c.heads + 2 * c.kv_heads, dim = c.dim, entries = c.offset + c.length;
  auto projected = random_floats(c.length * all_heads * dim);
  auto key_numbers = random_floats(c.kv_heads * std::max<int64_t>(c.offset, 1) * dim);
  auto value_numbers = random_floats(c.kv_heads * std::max<int64_t>(c.offset, 1) * dim);
  shape(key_numbers, c, dim, false);
  shape(value_numbers, c, dim, true);
  if (c.sink) {  // every query meets it
    for (int64_t i = 0; i < c.length * all_heads; ++i) {
      if (i % all_heads >= c.heads) continue;
      for (int64_t d = 0; d < dim; ++d) projected[i * dim + d] = 0.2f + 0.1f * projected[i * dim + d];
    }
  }
  const auto scores = random_floats(c.heads);
  const Guarded qkv = guarded(projected), sinks = guarded(scores);
  Guarded out(c.length * c.heads * dim * 4);
  AttendCall call;
  call.qkv = qkv.as<float>();
  call.heads = c.heads;
  call.kv_heads = c.kv_heads;
  call.dim = dim;
  call.rule = {0.1f, c.softcap};
  call.window = c.window;
  if (c.learned) call.sinks = sinks.as<float>();
  call.out = out.as<float>();
  Blocks blocks(call, c.packings, entries);
  for (int64_t h = 0; h < c.kv_heads; ++h) {
    for (int64_t i = 0; i < c.offset; ++i) {
      const int64_t at = (h * c.offset + i) * dim;
      blocks.write(kernels, h, i, key_numbers.data() + at, value_numbers.data() + at);
    }
  }
  blocks.rows(c.length, c.offset, c.phase);
  run_attend(Pool::shared(), kernels, call);

  for (int64_t h = 0; h < c.kv_heads; ++h) {
    std::vector<float> keys, values;
    blocks.read(kernels, h, entries, keys, values);
    for (int64_t i = 0; i < entries; ++i) {
      const float* token = projected.data() + (i - c.offset) * all_heads * dim;
      const bool past = i < c.offset;
      const auto stored = [&](const std::vector<float>& before, int64_t head) {  // past entries were written as they are stored
        const float* from = past ? before.data() + (h * c.offset + i) * dim : nullptr;
        if (past) return std::vector<float>(from, from + dim);
        const std::vector<double> made = transformed(token + head * dim, dim);
        return std::vector<float>(made.begin(), made.end());
      };
      check_codes(kernels, c.packings.keys, dim, stored(key_numbers, c.heads + h).data(), keys.data() + i * dim);
      check_codes(kernels, c.packings.values, dim, stored(value_numbers, c.heads + c.kv_heads + h).data(), values.data() + i * dim);
    }
    const std::vector<double> numbers(values.begin(), values.end());
    const int64_t shared = c.heads / c.kv_heads;
    for (int64_t t = 0; t < c.length; ++t) {
      for (int64_t head = h * shared; head < (h + 1) * shared; ++head) {
        const float* query = projected.data() + (t * all_heads + head) * dim;
        const std::vector<double> q = transformed(query, dim);
        const int64_t first = first_seen(call, c.offset + t), count = c.offset + t + 1 - first;
        std::vector<Seen> seen(static_cast<size_t>(count));
        std::vector<double> expected(static_cast<size_t>(dim), 0.0);
        double top = c.learned ? scores[head] : -1e30;
        for (int64_t i = 0; i < count; ++i) {
          Seen& entry = seen[i];
          entry = {0, 0, 0, numbers.data() + (first + i) * dim};
          for (int64_t d = 0; d < dim; ++d) {
            const double k = keys[(first + i) * dim + d];
            entry.weight += 0.1 * q[d] * k;
            entry.key_length += k * k;
            entry.largest_value = std::max(entry.largest_value, std::fabs(entry.value[d]));
          }
          entry.key_length = std::sqrt(entry.key_length);
          if (c.softcap > 0) entry.weight = c.softcap * std::tanh(entry.weight / c.softcap);
          top = std::max(top, entry.weight);
        }
        double total = c.learned ? std::exp(scores[head] - top) : 0;
        for (Seen& entry : seen) total += entry.weight = std::exp(entry.weight - top);
        for (Seen& entry : seen) {
          entry.weight /= total;
          for (int64_t d = 0; d < dim; ++d) expected[d] += entry.weight * entry.value[d];
        }
        std::vector<double> bounds(static_cast<size_t>(dim), 2e-4);
        if (c.phase == Phase::decode) bounds = decode_bounds(c, seen, q, keys, first, expected);
        else if (kernels.rounds_attention) bounds = rounding_bounds(seen, q, 0.1, expected);
        if (c.phase == Phase::decode || kernels.rounds_attention) bounds = transformed_bounds(bounds);
        expected = transformed(expected.data(), dim);
        const float* got = out.as<float>() + (t * c.heads + head) * dim;
        for (int64_t d = 0; d < dim; ++d) {
          if (!(std::fabs(got[d] - expected[d]) <= bounds[d])) return check(false, "packed attention", kernels.name);
        }
      }
    }
  }
}

// Of `spoiled` (query, key or value) one number of the last token is not finite: nor is what that token makes of it, and no other.
void test_spoiled(const Kernels& kernels, const Packings& packings, Phase phase, int64_t spoiled, float with) {
  constexpr int64_t kLength = 9, kDim = 64;
  auto projected = random_floats(kLength * 3 * kDim);
  projected[((kLength - 1) * 3 + spoiled) * kDim + 5] = with;
  const Guarded qkv = guarded(projected);
  Guarded out(kLength * kDim * 4);
  AttendCall call;
  call.qkv = qkv.as<float>();
  call.heads = call.kv_heads = 1;
  call.dim = kDim;
  call.out = out.as<float>();
  Blocks blocks(call, packings, kLength);
  blocks.rows(kLength, 0, phase);
  run_attend(Pool::shared(), kernels, call);
  const auto finite = [&](int64_t t) {
    bool all = true;
    for (int64_t d = 0; d < kDim; ++d) all = all && std::isfinite(out.as<float>()[t * kDim + d]);
    return all;
  };
  check(!finite(kLength - 1), "what is not finite shows in packed attention", kernels.name);
  check(phase == Phase::prefill || finite(kLength - 2), "what is not finite stays with who sees it", kernels.name);
}

// The same bits however many threads, and alone or as one of several; for the second half of a prompt, as for all of it.
void test_same_bits(const Kernels& kernels, const Packings& packings, Phase phase, int64_t window) {
  constexpr int64_t kHeads = 6, kKvHeads = 2, kDim = 80, kOffset = 1274, kLength = 9;
  constexpr int64_t kRow = (kHeads + 2 * kKvHeads) * kDim;
  const auto projected = random_floats(kLength * kRow), past = random_floats(kOffset * kDim);
  const Guarded qkv = guarded(projected);
  AttendCall call;
  call.heads = kHeads;
  call.kv_heads = kKvHeads;
  call.dim = kDim;
  call.rule = {0.1f, 0};
  call.window = window;
  Blocks blocks(call, packings, kOffset + kLength);
  for (int64_t i = 0; i < kOffset * kKvHeads; ++i) {
    blocks.write(kernels, i % kKvHeads, i / kKvHeads, &past[i / kKvHeads * kDim], &past[(kOffset - 1 - i / kKvHeads) * kDim]);
  }
  const auto attended = [&](int threads, int64_t together) {
    Pool::shared().set_threads(threads);
    std::vector<float> out(kLength * kHeads * kDim);
    for (int64_t t = 0; t < kLength; t += together) {
      call.qkv = qkv.as<float>() + t * kRow;
      blocks.rows(std::min(together, kLength - t), kOffset + t, phase);
      call.out = out.data() + t * kHeads * kDim;
      run_attend(Pool::shared(), kernels, call);
    }
    return out;
  };
  const int threads = Pool::shared().threads();
  const auto expected = attended(1, kLength);
  for (const int other : {1, 2, 7}) {
    for (const int64_t together : {1, 4, 9}) check(attended(other, together) == expected, "the same packed bits", kernels.name);
  }
  Pool::shared().set_threads(threads);
}

}  // namespace

void test_packed(const Kernels& kernels) {
  constexpr Packing kKeys[] = {{8, 32}, {6, 64}}, kValues[] = {{8, 32}, {5, 64}, {4, 32}};
  int turn = 0;
  for (const Packing& keys : kKeys) {
    for (const Packing& values : kValues) {
      const Packings packings{keys, values};
      for (const int64_t dim : {16, 48, 64, 80, 112, 128, 256}) {
        const int64_t shared = turn++ % 5 + 1, kv_heads = turn % 2 + 1;
        for (const int64_t length : {1, 3, 9}) {
          test_case(kernels, {.packings = packings, .length = length, .heads = kv_heads * shared, .kv_heads = kv_heads,
                              .dim = dim, .offset = 150, .window = turn % 3 == 0 ? 70 : 0,
                              .softcap = turn % 4 == 0 ? 5.0f : 0.0f, .learned = turn % 2 == 0});
        }
      }
      for (const int64_t offset : {0, 1, 15, 127, 128, 900}) {
        for (const int64_t length : {1, 2, 20}) test_case(kernels, {.packings = packings, .length = length, .offset = offset});
      }
      for (const bool outliers : {false, true}) {
        for (const int64_t length : {2, 20}) {
          test_case(kernels, {.packings = packings, .length = length, .offset = 400, .sink = true, .outliers = outliers});
          test_case(kernels, {.packings = packings, .length = length, .offset = 300, .outliers = outliers});
        }
      }
      for (const Phase phase : {Phase::prefill, Phase::decode}) {
        for (const int64_t window : {0, 100, 700}) test_same_bits(kernels, packings, phase, window);
        for (const float with : {std::nanf(""), std::numeric_limits<float>::infinity(), 1e38f}) {
          test_spoiled(kernels, packings, phase, 2, with);
          test_spoiled(kernels, packings, phase, 1, with);
          if (!std::isfinite(with)) test_spoiled(kernels, packings, phase, 0, with);
        }
      }
    }
  }
}

}  // namespace headrace::tests
