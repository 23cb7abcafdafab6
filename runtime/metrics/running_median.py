"""Running median of the newest measurements, robust to outliers.

For times of passes that decide on the next ones (chunk budgets, draft tokens): one slow pass must change nothing.

Guard: tests/runtime/speculation/test_controller.py.
"""

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
