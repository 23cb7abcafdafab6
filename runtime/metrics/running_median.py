"""Running median of the newest measurements, robust to outliers."""

import statistics
from collections import deque


class RunningMedian:
    """Median of the newest `size` values; `median` is None before the first."""

    def __init__(self, size: int) -> None:
        self._values: deque[float] = deque(maxlen=size)
        self.median: float | None = None

    def add(self, value: float) -> None:
        self._values.append(value)
        self.median = statistics.median(self._values)
