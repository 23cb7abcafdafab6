// How fast memory can be read: the ceiling that decode speed is measured against.
#pragma once

#include <cstddef>

#include "pool.h"

namespace headrace {

// Seconds for all of the pool's threads to read `bytes` at `data` once, the best of `passes`. Use a buffer several times
// larger than the caches.
double streaming_read_seconds(Pool& pool, const void* data, std::size_t bytes, int passes);

}  // namespace headrace
