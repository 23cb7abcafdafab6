"""What decoding was like since the model was loaded: by time, and by what was in the cache.

Fed with every step, read by the charts; bounded. Seconds of decoding count, not those between answers.
"""

from collections import deque
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass

from headrace.runtime.metrics.telemetry import StepRecord

SAMPLE_S = 1.0  # of decoding, for one entry of the history
KEPT = 512
BUCKET = 64  # context tokens that count as the same
_RECENT = 30  # entries
_LEAST_STEPS = 8  # of an answer's last part, to be an entry too; tokens of a bucket: fewer are one slow step's


@dataclass(frozen=True, slots=True)
class Sample:
    """About a second of decoding."""

    tokens_per_second: float
    achieved_gb_s: float
    tokens_per_step: float  # above one where guesses were right


class DecodeHistory:
    """`add` steps, end an answer with `end_turn`."""

    def __init__(self) -> None:
        self.samples: deque[Sample] = deque(maxlen=KEPT)
        self._by_context: dict[int, tuple[int, float]] = {}  # bucket: tokens, seconds
        self._tokens, self._steps, self._seconds, self._bytes = 0, 0, 0.0, 0  # of the next sample

    def add(self, records: Iterable[StepRecord]) -> None:
        """Steps of an answer; its first, whose latency is not between tokens, is left out."""
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
        """The answer is over: its last part is an entry if it was long enough to say something."""
        if self._steps >= _LEAST_STEPS:
            self._sample()
        self._tokens, self._steps, self._seconds, self._bytes = 0, 0, 0.0, 0

    def speeds(self) -> list[tuple[int, float]]:
        """(context in tokens, tokens per second there), the shortest context first; none of a few tokens alone."""
        half = BUCKET // 2
        return [
            (bucket * BUCKET + half, tokens / seconds)
            for bucket, (tokens, seconds) in sorted(self._by_context.items())
            if tokens >= _LEAST_STEPS
        ]

    @property
    def token_gb_s(self) -> float | None:
        """The bandwidth at which tokens came of late if each had read all that a step reads; None before an entry.

        Without guesses that is what steps achieved, computed. A guess that was right brings its token with the bytes
        of another's step: so it is what says when the tokens to come will be there.
        """
        recent = list(self.samples)[-_RECENT:]
        return sum(sample.achieved_gb_s * sample.tokens_per_step for sample in recent) / len(recent) if recent else None

    def copy(self) -> "DecodeHistory":
        """One that stays as it is."""
        return deepcopy(self)

    def _sample(self) -> None:
        tokens, steps, seconds = self._tokens, self._steps, self._seconds
        self.samples.append(Sample(tokens / seconds, self._bytes / seconds / 1e9, tokens / steps))
        self._tokens, self._steps, self._seconds, self._bytes = 0, 0, 0.0, 0
