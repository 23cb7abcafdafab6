// Rotary position embedding, half-split layout: pair (i, i + dims / 2) turns by position * inverse[i].
//
// Layers share a Rope, so the table of a pass's positions is computed once.
//
// Guard: runtime/native/tests/rows.cpp; tests/runtime/ops/test_native_recurrent.py (rotation of heads).
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace headrace {

class Rope : public std::enable_shared_from_this<Rope> {
 public:
  // `periods` (dims / 2): radians = position / period. `amplitude` scales rotated dimensions.
  Rope(std::vector<float> periods, float amplitude);

  int64_t dims() const { return static_cast<int64_t>(2 * inverse_.size()); }

  // Positions [offset, offset + count).
  struct Run {
    int64_t offset;
    int64_t count;
    bool operator==(const Run&) const = default;
  };
  struct Table {
    std::vector<Run> runs;
    std::vector<float> cosine, sine;  // (positions, dims / 2), amplitude folded in
  };
  // The positions of all runs in order.
  std::shared_ptr<const Table> table(const std::vector<Run>& runs);

  // Rotates the first `dims` of a head in place, at a row of the table.
  void rotate(const Table& table, int64_t row, float* head) const;

 private:
  std::vector<float> inverse_;
  float amplitude_;
  std::mutex mutex_;
  std::shared_ptr<const Table> last_;
};

}  // namespace headrace
