// Token selection (sample.h). Only the few tokens around a cut are sorted: passes over all logits count tokens and weight above a limit,
// which closes in on the cut.
#include "sample.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "scratch.h"

namespace headrace {
namespace {

constexpr int64_t kBlock = 1024;   // logits summed in float32; blocks are summed in double
constexpr int64_t kSorted = 256;   // most tokens around a cut to sort
constexpr float kNever = -std::numeric_limits<float>::infinity();

int64_t padded(int64_t n) { return (n + kScorePad - 1) / kScorePad * kScorePad; }

struct Sum {
  double count = 0;
  double mass = 0;
};

// Logits and their weights, e^(logit - top), padded with zero weights.
struct Candidates {
  const Kernels* kernels;
  float* x;
  float* weights;
  int64_t n;

  Sum above(float limit) const {
    Sum all;
    for (int64_t i = 0; i < padded(n); i += kBlock) {
      const Share here = kernels->share_above(x + i, weights + i, std::min(kBlock, padded(n) - i), limit);
      all.count += here.count;
      all.mass += here.mass;
    }
    return all;
  }

  void drop(int64_t i) {
    x[i] = kNever;
    weights[i] = 0;
  }
};

// Divide logits into x, padded. Returns the maximum; with a NaN, NaN; with infinities of both signs, the maximum or NaN
// (the padding is minus infinity).
float fill(const Kernels& kernels, const float* logits, int64_t n, float divisor, float* x) {
  const int64_t whole = n / kScorePad * kScorePad;
  float top = kernels.divided(logits, whole, divisor, x);
  if (whole < n) {
    float rest[kScorePad];
    std::fill(rest, rest + kScorePad, kNever);
    std::copy(logits + whole, logits + n, rest);
    const float last = kernels.divided(rest, kScorePad, divisor, x + whole);
    if (!(last <= top)) top = std::isnan(top) ? top : last;
  }
  return top;
}

// The index of the first x equal to `value`; with a NaN value that of the first NaN or plus infinity. 0 if there is none.
uint32_t first_of(const float* x, int64_t n, float value) {
  const auto odd = [](float each) { return !(each < -kNever); };  // also infinities: their sums may be NaN
  const float* at = std::isnan(value) ? std::find_if(x, x + n, odd) : std::find(x, x + n, value);
  return at == x + n ? 0 : static_cast<uint32_t>(at - x);
}

// Copy those of `from` in (lo, hi], in order, to `to`, which may be the same.
void between(const Candidates& from, float lo, float hi, Candidates& to) {
  int64_t kept = 0;
  for (int64_t i = 0; i < from.n; i += kScorePad) {
    const int64_t end = std::min(from.n, i + kScorePad);
    if (from.kernels->share_above(from.x + i, from.weights + i, kScorePad, lo).count == 0) continue;
    for (int64_t j = i; j < end; ++j) {
      if (from.x[j] > lo && from.x[j] <= hi) {
        to.x[kept] = from.x[j];
        to.weights[kept++] = from.weights[j];
      }
    }
  }
  to.n = kept;
  for (int64_t i = kept; i < padded(kept); ++i) to.drop(i);
}

// Cut after the largest candidates that together `reach` the target; returns a limit that only these are above. Drops equals of the
// last one kept.
template <class Reach>
float cut(Candidates& all, float top, Reach&& reach) {
  // Those above `hi` are too few, those above `lo` enough. `few` are the candidates between, `base` the total above them.
  constexpr float kLeast = std::numeric_limits<float>::lowest();
  float hi = top, lo = top;
  Candidates few = all;
  Sum base, over, enough;
  const auto above = [&](float limit) {
    const Sum here = few.above(limit);
    return Sum{base.count + here.count, base.mass + here.mass};
  };
  float* room = scratch(Slot::cut_logits, padded(all.n));
  float* weights_room = scratch(Slot::cut_weights, padded(all.n));
  const auto narrow = [&] {
    const Candidates from = few;
    few.x = room;
    few.weights = weights_room;
    between(from, lo, hi, few);
    base = over;
  };
  for (float step = 1;; step *= step < 64 ? 2 : 1024) {
    lo = std::max(top - step, kLeast);
    enough = above(lo);
    if (reach(enough)) break;
    if (lo == kLeast) return kNever;  // nothing to cut
    hi = lo;
    over = enough;
  }
  while (enough.count - over.count > kSorted) {
    const float middle = lo / 2 + hi / 2;
    if (middle <= lo || middle >= hi) break;  // neighbouring floats: the rest are equal
    if (4 * (enough.count - over.count) < static_cast<double>(few.n)) narrow();  // it costs as much as a few passes
    const Sum here = above(middle);
    if (reach(here)) {
      lo = middle;
      enough = here;
    } else {
      hi = middle;
      over = here;
    }
  }
  narrow();
  int64_t order[kSorted];
  const bool sorts = few.n <= kSorted;
  if (sorts) {
    for (int64_t i = 0; i < few.n; ++i) order[i] = i;
    std::sort(order, order + few.n, [&](int64_t a, int64_t b) {
      return few.x[a] != few.x[b] ? few.x[a] > few.x[b] : a < b;
    });
  }
  float limit = kNever;
  int64_t equals = 0;  // kept ones equal to the last
  for (int64_t i = 0; i < few.n; ++i) {
    const int64_t at = sorts ? order[i] : i;
    equals = few.x[at] == limit ? equals + 1 : 1;
    limit = few.x[at];
    over.count += 1;
    over.mass += few.weights[at];
    if (reach(over)) break;
  }
  if (std::count(few.x, few.x + few.n, limit) > equals) {
    for (int64_t i = 0; i < all.n; ++i) {
      if (all.x[i] == limit && --equals < 0) all.drop(i);
    }
  }
  return std::nextafter(limit, kNever);
}

}  // namespace

uint32_t likeliest(const Kernels& kernels, const float* logits, int64_t n) {
  float block[kBlock];  // stays in the L1: a copy of all logits would be written to memory, and read again
  float top = kNever;
  int64_t best = 0;  // the first logit of the block with the largest
  for (int64_t i = 0; i < n; i += kBlock) {
    const float here = fill(kernels, logits + i, std::min(kBlock, n - i), 1, block);
    if (std::isnan(here)) return first_of(logits, n, here);
    if (here > top) {
      top = here;
      best = i;
    }
  }
  return static_cast<uint32_t>(best) + first_of(logits + best, n - best, top);
}

uint32_t sample(const Kernels& kernels, const float* logits, int64_t n, const SampleRule& rule, uint64_t random) {
  Candidates all{&kernels, scratch(Slot::logits, padded(n)), scratch(Slot::weights, padded(n)), n};
  const float top = fill(kernels, logits, n, rule.temperature, all.x);
  if (!std::isfinite(top)) return first_of(all.x, n, top);
  double total = 0;
  for (int64_t i = 0; i < padded(n); i += kBlock) {
    total += kernels.exponentials(all.x + i, std::min(kBlock, padded(n) - i), top, all.weights + i);
  }
  float limit = kNever;
  if (rule.top_k > 0 && rule.top_k < n) {
    limit = cut(all, top, [&](const Sum& sum) { return sum.count >= static_cast<double>(rule.top_k); });
    total = all.above(limit).mass;
  }
  if (rule.top_p < 1) {
    limit = std::max(limit, cut(all, top, [&](const Sum& sum) { return sum.mass >= rule.top_p * total; }));
  }
  if (rule.min_p > 0) {
    const float least = top + std::log(rule.min_p);
    limit = std::max(limit, std::min(std::nextafter(least, kNever), std::nextafter(top, kNever)));
  }

  // The first with a cumulative share beyond the point.
  total = all.above(limit).mass;
  const double point = static_cast<double>(random >> 11) * 0x1p-53 * total;
  double passed = 0;
  uint32_t last = first_of(all.x, n, top);
  for (int64_t begin = 0; begin < padded(n); begin += kBlock) {
    const int64_t end = std::min(padded(n), begin + kBlock);
    const double here = kernels.share_above(all.x + begin, all.weights + begin, end - begin, limit).mass;
    if (here == 0) continue;
    const bool stop = passed + here > point;
    if (stop || passed + here >= total) {  // or the last with any weight
      double so_far = passed;
      for (int64_t i = begin; i < std::min(n, end); ++i) {
        if (!(all.x[i] > limit) || all.weights[i] == 0) continue;
        so_far += all.weights[i];
        last = static_cast<uint32_t>(i);
        if (so_far > point) return last;
      }
    }
    passed += here;
  }
  return last;  // the point is beyond the rounded sum
}

}  // namespace headrace
