"""An answer on standard output as it grows, sanitised for a terminal; prefill progress on standard error."""

import sys
import time
from collections.abc import Iterable

from headrace.app.answer.answer import Answer
from headrace.app.output.sanitise import Sanitiser
from headrace.app.output.terminal import can_redraw
from headrace.models.text.answer import Completed, Part, TextChunk

_PATIENCE_S = 1.0  # of prefill before its progress is shown
_PROGRESS_WIDTH = 60


class AnswerStream:
    """Prints one answer."""

    def __init__(self, answer: Answer, *, echo: bool, quiet: bool) -> None:
        """echo: print the text. quiet: show no progress."""
        self._started = answer.prompt.started
        self._echo = echo
        self._draws = can_redraw(sys.stderr) and not quiet
        self._sanitiser = Sanitiser()
        self._last = ""
        self._progress_drawn = False

    def follow(self, parts: Iterable[Part]) -> None:
        """Consume the answer to its end."""
        for part in parts:
            if isinstance(part, TextChunk | Completed):
                self._clear_progress()
                self._print(part.text)
            else:
                self._draw_progress(part.done, part.total)
        if self._last and not self._last.endswith("\n"):
            sys.stdout.write("\n")
            sys.stdout.flush()

    def _print(self, text: str) -> None:
        if text and self._echo:
            self._last = text
            sys.stdout.write(self._sanitiser.feed(text))
            sys.stdout.flush()

    def _draw_progress(self, done: int, total: int) -> None:
        if self._draws and time.perf_counter() - self._started > _PATIENCE_S:
            self._progress_drawn = True
            sys.stderr.write(f"\r{f'prefill {done} of {total} tokens':<{_PROGRESS_WIDTH}}")
            sys.stderr.flush()

    def _clear_progress(self) -> None:
        if self._progress_drawn:
            self._progress_drawn = False
            sys.stderr.write(f"\r{'':<{_PROGRESS_WIDTH}}\r")
            sys.stderr.flush()
