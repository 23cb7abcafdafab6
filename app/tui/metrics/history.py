"""Decode speed since the model was loaded, recent and by context length. Bounded.

Only seconds of decoding count.

`LiveMetrics` has one for each loaded model. The chart of speed by context reads `speeds` and `token_gb_s`; the time
until the context is full follows from the latter.

Guard: tests/tui/test_charts.py.
"""

from collections import deque
from collections.abc import Iterable

from headrace.runtime.metrics.telemetry import StepRecord

SAMPLE_S = 1.0  # of decoding, for one sample
BUCKET = 64  # context tokens that count as the same
_RECENT = 30  # samples
_MIN_STEPS = 8  # of an answer's last part, to be a sample too; tokens of a bucket: fewer are one slow step's


class DecodeHistory:
    """`add` steps, close an answer with `end_turn`."""

    def __init__(self) -> None:
        self.samples: deque[float] = deque(maxlen=_RECENT)  # GB/s, times the tokens of a step
        self._by_context: dict[int, tuple[int, float]] = {}  # bucket: tokens, seconds
        self._begin_sample()

    def _begin_sample(self) -> None:
        """Set the sums of the next sample to 0."""
        self._tokens = 0
        self._steps = 0
        self._seconds = 0.0
        self._bytes = 0

    def add(self, records: Iterable[StepRecord]) -> None:
        """Add steps of an answer; its first, whose latency is not between tokens, is left out."""
        for record in records:
            if record.index == 0 or record.latency_s <= 0:
                continue
            bucket = record.context // BUCKET
            tokens, seconds = self._by_context.get(bucket, (0, 0.0))
            self._by_context[bucket] = tokens + record.tokens, seconds + record.latency_s
            self._tokens += record.tokens
            self._steps += 1
            self._seconds += record.latency_s
            self._bytes += record.step_bytes
            if self._seconds >= SAMPLE_S:
                self._sample()

    def end_turn(self) -> None:
        """Close the answer; its last part becomes a sample if it is long enough."""
        if self._steps >= _MIN_STEPS:
            self._sample()
        self._begin_sample()

    def speeds(self) -> list[tuple[int, float]]:
        """Return (context tokens, tokens per second), the shortest context first; too few tokens are left out."""
        half = BUCKET // 2
        return [
            (bucket * BUCKET + half, tokens / seconds)
            for bucket, (tokens, seconds) in sorted(self._by_context.items())
            if tokens >= _MIN_STEPS
        ]

    @property
    def token_gb_s(self) -> float | None:
        """Recent bandwidth times tokens per step, in GB/s; None before the first sample.

        Tokens per second at a context length follow from this divided by the bytes of a step.
        """
        if not self.samples:
            return None
        return sum(self.samples) / len(self.samples)

    def _sample(self) -> None:
        """Append a sample of the steps since the last one."""
        self.samples.append(self._bytes / self._seconds / 1e9 * self._tokens / self._steps)
        self._begin_sample()
