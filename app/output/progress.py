"""Drawing the progress of long work on stderr: a bar on a terminal, a line per stage elsewhere, nothing when quiet.

    with drawn_progress() as progress:
        resolve(name, progress=progress)

rich is imported when the first bar is drawn, so work that is already done costs nothing. NO_COLOR is respected.
"""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headrace.app.output.terminal import can_redraw, may_style
from headrace.models.registry.progress import Progress, silent

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

_LINE_SECONDS = 10.0  # how often a log hears of the same stage


@contextmanager
def drawn_progress(*, quiet: bool = False) -> Iterator[Progress]:
    """A sink for `models.registry.progress` reports, from any thread; whatever it drew is finished on exit."""
    if quiet:
        yield silent
    elif can_redraw(sys.stderr):
        bars = _Bars()
        try:
            yield bars
        finally:
            bars.close()
    else:
        yield _Lines()


class _Bars:
    """One rich bar, relabelled for each stage; it disappears at the end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._display: RichProgress | None = None
        self._task: TaskID | None = None
        self._stage: str | None = None

    def __call__(self, stage: str, done: int, total: int | None, /) -> None:
        with self._lock:
            display = self._started()
            if stage != self._stage or self._task is None:
                if self._task is not None:
                    display.remove_task(self._task)
                self._task, self._stage = display.add_task(stage.capitalize(), total=total), stage
            display.update(self._task, completed=done, total=total)

    def _started(self) -> "RichProgress":
        if self._display is None:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
            from rich.progress import Progress as RichProgress

            self._display = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=30),
                DownloadColumn(binary_units=True),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True, color_system="auto" if may_style(sys.stderr) else None),
                transient=True,
            )
            self._display.start()
        return self._display

    def close(self) -> None:
        with self._lock:
            if self._display is not None:
                try:
                    self._display.stop()
                finally:  # an interrupt may have come in the middle of that
                    self._display.console.show_cursor()


class _Lines:
    """A plain line when a stage begins, and now and then while it lasts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stage: str | None = None
        self._said = 0.0

    def __call__(self, stage: str, done: int, total: int | None, /) -> None:
        with self._lock:
            now = time.monotonic()
            if stage == self._stage and now - self._said < _LINE_SECONDS:
                return
            share = f" {done / total:.0%}" if total and stage == self._stage else ""
            self._stage, self._said = stage, now
            print(f"{stage}{share} ...", file=sys.stderr, flush=True)
