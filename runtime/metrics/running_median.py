"""The median of the newest measurements: one that somebody else's work held up says nothing of the next."""

import statistics
from collections import deque


class Recent:
    """Of at most `most` values, the newest. `median` is None before there are any."""

    def __init__(self, most: int) -> None:
        self._values: deque[float] = deque(maxlen=most)
        self.median: float | None = None

    def add(self, value: float) -> None:
        self._values.append(value)
        self.median = statistics.median(self._values)
