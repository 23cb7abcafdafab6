"""Progress of many answers: one line on standard error, redrawn in place; nothing where that is not possible.

`headrace batch` and `run --samples` draw it:

412/1000 done · 2 failed · 8 running · 578 waiting · 312 tok/s · K/V 37 % · 4 min 10 s left

Guards: tests/app/batch/test_run_batch.py.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

from msgspec import Struct

from headrace.app.answer.first_pass import FirstPassLine
from headrace.app.output.progress import RedrawnLine
from headrace.runtime.metrics.units import format_long, percent, three_digits

_EVERY_S = 0.2  # between two drawings
_AVERAGED_S = 5.0  # of tokens, for the speed


class Counts(Struct, frozen=True):
    """Requests by state.

    total: all of them.
    done: with a result, those of earlier runs included.
    answered: of this run.
    failed: of this run.
    running: in the engine.
    waiting: not submitted yet.
    kv_share: share of the K/V budget in use; None without a budget.
    """

    total: int
    done: int
    answered: int
    failed: int
    running: int
    waiting: int
    kv_share: float | None


class ProgressLine:
    """Draws progress. Before a write to a stream that may share the terminal, call what `before(stream)` returned.

    first_pass: report for `Engine.first_pass`.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._line = RedrawnLine(quiet=quiet)
        self.first_pass = FirstPassLine(self._line, quiet=quiet)
        self._started = time.monotonic()
        self._drawn_at = float("-inf")
        # Times, and tokens until then, of the last drawings: the speed is that between the first and the last.
        self._totals: deque[tuple[float, int]] = deque([(self._started, 0)])
        self._tokens = 0

    def update(self, tokens: int, counts: Callable[[], Counts]) -> None:
        """Count the tokens of a step, and redraw if it is time."""
        self._tokens += tokens
        now = time.monotonic()
        if not self._line.draws or now - self._drawn_at < _EVERY_S:
            return
        self._drawn_at = now
        self._totals.append((now, self._tokens))
        while len(self._totals) > 2 and now - self._totals[0][0] > _AVERAGED_S:
            self._totals.popleft()
        self._line.draw(progress_text(counts(), self._speed(), now - self._started))

    def clear(self) -> None:
        """Erase the line."""
        self._line.clear()

    def before(self, stream: TextIO) -> Callable[[], None]:
        """Return the function to call before each write to `stream`."""
        return self.clear if stream.isatty() else lambda: None

    def _speed(self) -> float | None:
        (since, before), (now, tokens) = self._totals[0], self._totals[-1]
        if now > since and tokens > before:
            return (tokens - before) / (now - since)
        return None


def progress_text(counts: Counts, tokens_per_second: float | None, elapsed_s: float) -> str:
    """Return the progress line, most important first."""
    parts = [f"{counts.done}/{counts.total} done"]
    if counts.failed:
        parts.append(f"{counts.failed} failed")
    parts += [f"{counts.running} running", f"{counts.waiting} waiting"]
    if tokens_per_second is not None:
        parts.append(f"{three_digits(tokens_per_second)} tok/s")
    if counts.kv_share is not None:
        parts.append(f"K/V {percent(counts.kv_share)}")
    if counts.answered:
        parts.append(f"{format_long(elapsed_s / counts.answered * (counts.running + counts.waiting))} left")
    return " · ".join(parts)
