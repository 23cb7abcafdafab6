// Rotary position embedding: tables of sines and cosines, and the rotation (rope.h).
#include "rope.h"

#include <cmath>
#include <utility>

namespace headrace {

Rope::Rope(std::vector<float> periods, float amplitude) : inverse_(std::move(periods)), amplitude_(amplitude) {
  for (float& period : inverse_) period = 1.0f / period;
}

std::shared_ptr<const Rope::Table> Rope::table(const std::vector<Run>& runs) {
  std::lock_guard<std::mutex> guard(mutex_);
  if (last_ != nullptr && last_->runs == runs) return last_;
  auto table = std::make_shared<Table>();
  table->runs = runs;
  for (const Run& run : runs) {
    for (int64_t position = run.offset; position < run.offset + run.count; ++position) {
      for (const float inverse : inverse_) {
        // The angle is rounded to float32 like the reference's; far positions would differ otherwise.
        const double angle = static_cast<float>(position) * inverse;
        table->cosine.push_back(amplitude_ * static_cast<float>(std::cos(angle)));
        table->sine.push_back(amplitude_ * static_cast<float>(std::sin(angle)));
      }
    }
  }
  last_ = table;
  return table;
}

void Rope::rotate(const Table& table, int64_t row, float* head) const {
  const auto half = static_cast<int64_t>(inverse_.size());
  const float* cosine = table.cosine.data() + row * half;
  const float* sine = table.sine.data() + row * half;
  float* low = head;
  float* high = head + half;
  for (int64_t i = 0; i < half; ++i) {
    const float a = low[i], b = high[i];
    low[i] = a * cosine[i] - b * sine[i];
    high[i] = b * cosine[i] + a * sine[i];
  }
}

}  // namespace headrace
