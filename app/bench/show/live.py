"""Live view of a run on stderr: the table so far, the current test, a bar and the time left.

Without a terminal, a line when a warm-up or a round begins, and regularly while a round lasts. `BenchSession.run`
yields the `BenchProgress` that is shown here.

Guard: tests/app/output/test_progress.py.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headrace.app.bench.measure.session import BenchProgress, Results, Show
from headrace.app.bench.show.columns import results_table
from headrace.app.output.terminal import can_redraw, console
from headrace.runtime.metrics.units import format_long, percent

_LINE_SECONDS = 10.0  # interval between log lines of one round


@contextmanager
def live_view() -> Iterator[Show]:
    """Yield a function to call with every `BenchProgress`; the view ends with the block."""
    if not can_redraw(sys.stderr):
        yield _LogLines()
        return
    screen = console(stderr=True)
    try:
        with Live(console=screen, transient=True, refresh_per_second=4) as live:
            yield lambda progress, results: live.update(_view(progress, results(), screen.width), refresh=True)
    finally:  # an interrupt may come while the view is being taken down
        screen.show_cursor()


class _LogLines:
    """Progress as log lines."""

    def __init__(self) -> None:
        self._round: int | None = None
        self._printed_s = 0.0

    def __call__(self, progress: BenchProgress, _results: Callable[[], Results]) -> None:
        now = time.monotonic()
        # Every warm-up gets a line: a peer may be slow, or stuck, at its first test.
        is_new = progress.round == 0 or progress.round != self._round
        if progress.done >= progress.total or (not is_new and now - self._printed_s < _LINE_SECONDS):
            return
        self._round = progress.round
        self._printed_s = now
        text = f"{_stage(progress)}: {progress.doing}"
        if progress.left_s is not None:
            text += f", {_left(progress.left_s)}"
        print(f"{text} ...", file=sys.stderr, flush=True)


def _view(progress: BenchProgress, results: Results, width: int) -> RenderableType:
    line = Table.grid(padding=(0, 1))
    line.add_row(
        ProgressBar(total=max(progress.total, 1), completed=progress.done, width=24),
        Text(f"{percent(progress.done / max(progress.total, 1)):>5}"),
        Text(f"{_stage(progress)} · {_left(progress.left_s)}", style="dim"),
    )
    now = Text(progress.doing, style="cyan", overflow="ellipsis", no_wrap=True)
    if not results:
        return Group(line, now)
    return Group(results_table(results, width), line, now)


def _stage(progress: BenchProgress) -> str:
    return f"round {progress.round}" if progress.round else "warm-up"


def _left(seconds: float | None) -> str:
    if seconds is None:
        return "time left unknown"
    return f"{format_long(seconds)} left"
