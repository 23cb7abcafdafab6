// Error bound of attention with 16-bit integer products.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "../core/kernels.h"

namespace headrace::tests {

// One entry of a query.
struct Seen {
  double weight;                       // after softmax
  double key_length, largest_value;    // of its numbers
  const double* value;                 // (D)
};

// Five standard deviations of independent roundings, uniform within their unit, per output column. Roundings of the query are common
// to all entries, so they are added up. Units: isa/attend_rounded.h.
inline std::vector<double> rounding_bounds(const std::vector<Seen>& seen, const std::vector<double>& q, double scale,
                                           const std::vector<double>& out) {
  double length = 0, largest = 0;
  for (const double v : q) {
    length += v * v;
    largest = std::max(largest, std::fabs(v));
  }
  length = std::sqrt(length);
  const double query_unit = std::max(length / 65000, largest / 32767);
  const auto entries = static_cast<int64_t>(seen.size());
  std::vector<double> variance(out.size(), 0.0), linear(out.size(), 0.0);
  for (int64_t i = 0; i < entries; ++i) {
    const Seen& e = seen[i];
    // The unit of this entry's contribution depends on its block: entries less than a block away.
    double most = 0, sum = 0;
    for (int64_t j = std::max<int64_t>(0, i - kRoundedEntries + 1); j < std::min(entries, i + kRoundedEntries); ++j) {
      most = std::max(most, seen[j].weight * seen[j].largest_value);
      sum += seen[j].weight * seen[j].largest_value;
    }
    const double added_unit = std::max(most / 32767, sum / 262000);
    for (size_t d = 0; d < out.size(); ++d) {
      const double apart = std::fabs(e.value[d] - out[d]);
      const double by_key = scale * length * e.key_length / 16384 * e.weight * apart;
      const double by_value = e.weight * e.largest_value / 4096;
      const double by_weight = 2 * added_unit * (e.largest_value > 0 ? std::fabs(e.value[d]) / e.largest_value : 0);
      variance[d] += (by_key * by_key + by_value * by_value + by_weight * by_weight) / 12;
      linear[d] += scale * query_unit * e.key_length * e.weight * apart + 1e-5 * e.weight * std::fabs(e.value[d]);
    }
  }
  std::vector<double> bounds;
  for (size_t d = 0; d < out.size(); ++d) bounds.push_back(5 * std::sqrt(variance[d]) + linear[d] + 1e-9);
  return bounds;
}

}  // namespace headrace::tests
