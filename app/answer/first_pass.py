"""Words for a model's first pass that takes long, and the line on standard error that has them.

The engine counts the seconds (`runtime/engine/first_pass.py`). `run`, `batch`, `bench`, `serve` and the chats show
them; in the engine's process they become `SlowFirstPass` events.

Guards: tests/app/answer/test_first_pass.py.
"""

import sys
from collections.abc import Callable

from headrace.app.output.progress import RedrawnLine
from headrace.runtime.metrics.units import format_long

_LOG_S = 10.0  # of a pass between two lines of a log


def first_pass_text(seconds: float) -> str:
    """Return the words for a first pass that has taken so long."""
    return f"first pass, {format_long(seconds)}: MLX compiles its kernels, once per machine and MLX version"


class FirstPassLine:
    """A report for `FirstPass` that draws a line, or logs some.

    On a terminal that is `line`, with the seconds counting. Elsewhere standard error gets log lines.
    """

    def __init__(self, line: RedrawnLine, *, quiet: bool) -> None:
        """quiet: say nothing."""
        self._line = line
        self._quiet = quiet
        self._log = FirstPassLog(lambda text: print(f"{text} ...", file=sys.stderr, flush=True))

    def __call__(self, seconds: float) -> None:
        if self._line.draws:
            self._line.draw(first_pass_text(seconds))
        elif not self._quiet:
            self._log.add(seconds)


class FirstPassLog:
    """Lines about a model's first pass: at its first report, and every _LOG_S."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """say: writes a line."""
        self._say = say
        self._num_intervals: int | None = None  # of _LOG_S that had passed at the latest line

    def begin(self) -> None:
        """Await the first pass of another model."""
        self._num_intervals = None

    def add(self, seconds: float) -> None:
        """Take a report."""
        num_intervals = int(seconds // _LOG_S)
        if num_intervals != self._num_intervals:
            self._num_intervals = num_intervals
            self._say(first_pass_text(seconds))
