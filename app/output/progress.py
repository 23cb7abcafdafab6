"""Progress of long work on stderr: a line drawn over itself on a terminal, a line per stage elsewhere.

with drawn_progress() as progress:
    resolve(name, progress=progress)

A program that prints other lines meanwhile takes a `stage_progress`, and calls its `clear` before them.

Guard: tests/app/output/test_progress.py.
"""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.app.output.sanitise import sanitise
from headrace.app.output.terminal import can_redraw, table_width
from headrace.models.registry.progress import Progress
from headrace.runtime.metrics.units import format_bytes, format_long, percent

_DRAW_S = 0.1  # between two drawings of a line, unless the stage changes
LOG_S = 10.0  # between two log lines of one stage
_BAR = 24  # columns, where the terminal has room
_LEAST_BAR = 8  # columns, where it has not


class RedrawnLine:
    """A line on standard error that is redrawn in place.

    Widths are in cells of the terminal: a Chinese character takes two.

    draws: False if nothing is drawn: no terminal, or `quiet`.
    """

    def __init__(self, *, quiet: bool) -> None:
        self.draws = can_redraw(sys.stderr) and not quiet
        self._width = 0  # cells of the drawn line, which spaces overwrite

    def draw(self, text: str) -> None:
        """Draw `text` over the line before, cut to the terminal's width."""
        if not self.draws:
            return
        from rich.cells import cell_len, set_cell_size  # late: most commands draw no line

        limit = _columns()
        if cell_len(text) > limit:
            text = set_cell_size(text, limit)
        width = cell_len(text)
        rest_of_old_line = " " * max(0, self._width - width)
        sys.stderr.write(f"\r{text}{rest_of_old_line}")
        sys.stderr.flush()
        self._width = width

    def clear(self) -> None:
        """Erase the line."""
        if self._width:
            sys.stderr.write(f"\r{' ' * self._width}\r")
            sys.stderr.flush()
            self._width = 0


def _columns() -> int:
    """Return the columns of a line on standard error."""
    return (table_width(sys.stderr) or 80) - 1  # some terminals wrap in the last column


class StageProgress:
    """A sink for progress reports from any thread (`models.registry.progress.Progress`). This one draws nothing."""

    def __call__(self, stage: str, done: int, total: int | None, /) -> None: ...

    def clear(self) -> None:
        """Erase the line, and forget the stage; the next report draws a line again."""


def stage_progress(*, quiet: bool = False, log_after_s: float = 0.0) -> StageProgress:
    """Return the sink for standard error: nothing if `quiet`, a line on a terminal, a line per stage elsewhere.

    log_after_s: seconds that a stage takes before its first log line.
    """
    if quiet:
        return StageProgress()
    if can_redraw(sys.stderr):
        return _Drawing()
    return _Log(log_after_s)


@contextmanager
def drawn_progress(*, quiet: bool = False, log_after_s: float = 0.0) -> Iterator[StageProgress]:
    """Yield a `stage_progress`, which is cleared on exit."""
    line = stage_progress(quiet=quiet, log_after_s=log_after_s)
    try:
        yield line
    finally:
        line.clear()


class NumberedStages:
    """Progress of several checks or passages, reported as the stage `check 3 of 12: NAME`. what: `check` in this."""

    def __init__(self, what: str, progress: Progress) -> None:
        self._what = what
        self._progress = progress
        self._stage = what

    def begin(self, number: int, total: int, name: str) -> None:
        """Report the next stage. number: from 1, of `total`."""
        self._stage = f"{self._what} {number} of {total}: {name}"
        self.tick()

    def tick(self) -> None:
        """Report that the stage goes on."""
        self._progress(self._stage, 0, None)


class _Drawing(StageProgress):
    """A status line with bar, bytes, speed and time left; elapsed time if the total is unknown."""

    def __init__(self) -> None:
        self._line = RedrawnLine(quiet=False)
        self._lock = threading.Lock()
        self._stage: str | None = None
        self._first = 0  # bytes done when the stage began, such as of a resumed download: not part of the speed
        self._started = 0.0
        self._drawn_at = 0.0

    def __call__(self, stage: str, done: int, total: int | None, /) -> None:
        with self._lock:
            now = time.monotonic()
            if stage != self._stage:
                self._stage = stage
                self._first = done
                self._started = now
            elif now - self._drawn_at < _DRAW_S:
                return
            self._drawn_at = now
            self._line.draw(self._text(done, total, now - self._started))

    def clear(self) -> None:
        with self._lock:
            self._stage = None
            self._line.clear()

    def _text(self, done: int, total: int | None, seconds: float) -> str:
        stage = sanitise(str(self._stage))
        stage = stage[:1].upper() + stage[1:]
        if not total:
            return f"{stage} · {format_long(seconds)}"
        parts = [f"{format_bytes(done)} of {format_bytes(total)}"]
        fresh = done - self._first
        if fresh > 0 and seconds > 1:  # earlier, the speed would jump
            parts += [f"{format_bytes(fresh / seconds)}/s", f"{format_long((total - done) * seconds / fresh)} left"]
        figures = " · ".join(parts)
        room = _columns() - len(f"{stage}  {figures}")
        bar = max(_LEAST_BAR, min(_BAR, room))
        filled = round(min(1.0, done / total) * bar)
        return f"{stage} {'━' * filled}{'╌' * (bar - filled)} {figures}"


class _Log(StageProgress):
    """A plain line when a stage begins, and regularly with the share that is done, if its total is known."""

    def __init__(self, after_s: float) -> None:
        """after_s: seconds of a stage before its first line, which then has the share."""
        self._after_s = after_s
        self._lock = threading.Lock()
        self._stage: str | None = None
        self._has_line = False  # of this stage
        self._next_line_at = 0.0

    def __call__(self, stage: str, done: int, total: int | None, /) -> None:
        with self._lock:
            now = time.monotonic()
            if stage != self._stage:
                self._stage = stage
                self._has_line = False
                self._next_line_at = now + self._after_s
            if now < self._next_line_at or (self._has_line and not total):
                return
            share = ""
            if total and (self._has_line or self._after_s):
                share = f" {percent(done / total)}"
            self._has_line = True
            self._next_line_at = now + LOG_S
            print(f"{sanitise(stage)}{share} ...", file=sys.stderr, flush=True)

    def clear(self) -> None:
        with self._lock:
            self._stage = None
