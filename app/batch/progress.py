"""One line on standard error that says how far a batch is, drawn over itself; nothing where that cannot be done.

412/1000 done · 2 failed · 8 running · 578 waiting · 312 tok/s · K/V 37% · 4 min 10 s left
"""

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

from headrace.app.answer.phrases import rate_digits
from headrace.app.batch.run import Batch
from headrace.app.output.terminal import can_redraw, table_width
from headrace.runtime.metrics.units import format_long

_EVERY_S = 0.2
_SPEED_S = 5.0  # the time that the speed is an average over


class ProgressLine:
    """Watches a batch. Whoever writes where it may be drawn asks for `before`."""

    def __init__(self, *, quiet: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._draws = can_redraw(sys.stderr) and not quiet
        self._clock = clock
        self._started = clock()
        self._drawn_at = float("-inf")
        self._width = 0
        self._said: deque[tuple[float, int]] = deque([(self._started, 0)])
        self._tokens = 0

    def __call__(self, batch: Batch, tokens: int) -> None:
        """A step gave so many tokens."""
        self._tokens += tokens
        now = self._clock()
        if not self._draws or now - self._drawn_at < _EVERY_S:
            return
        self._drawn_at = now
        self._said.append((now, self._tokens))
        while len(self._said) > 2 and now - self._said[0][0] > _SPEED_S:
            self._said.popleft()
        self._draw(progress_text(batch, self._speed(), batch.kv_share, now - self._started))

    def clear(self) -> None:
        """Take the line away."""
        if self._width:
            sys.stderr.write(f"\r{'':<{self._width}}\r")
            sys.stderr.flush()
            self._width = 0

    def before(self, stream: TextIO) -> Callable[[], None]:
        """What whoever writes to `stream` calls before: a terminal shows both."""
        return self.clear if stream.isatty() else lambda: None

    def _speed(self) -> float | None:
        (since, before), (now, tokens) = self._said[0], self._said[-1]
        return (tokens - before) / (now - since) if now > since and tokens > before else None

    def _draw(self, text: str) -> None:
        columns = (table_width(sys.stderr) or 80) - 1  # in the last one some terminals wrap
        text = text[:columns]
        sys.stderr.write(f"\r{text:<{self._width}}")
        sys.stderr.flush()
        self._width = len(text)


def progress_text(batch: Batch, tokens_per_second: float | None, kv_share: float | None, elapsed_s: float) -> str:
    """How far it is, what matters most first."""
    tally = batch.tally
    parts = [f"{tally.done}/{tally.total} done"]
    if tally.failed:
        parts.append(f"{tally.failed} failed")
    parts += [f"{batch.running} running", f"{batch.waiting} waiting"]
    if tokens_per_second is not None:
        parts.append(f"{rate_digits(tokens_per_second)} tok/s")
    if kv_share is not None:
        parts.append(f"K/V {kv_share:.0%}")
    left = batch.running + batch.waiting
    if tally.answered:
        parts.append(f"{format_long(elapsed_s / tally.answered * left)} left")
    return " · ".join(parts)
