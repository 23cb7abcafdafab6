"""An answer as it arrives: printed on standard output, made safe for a terminal, and remembered for the report."""

import sys
import time
from collections.abc import Iterable

from headrace.app.output.sanitise import Sanitiser
from headrace.app.output.terminal import can_redraw
from headrace.models.text.answer import Completed, Part, TextChunk
from headrace.runtime.engine.request import Finished, Step

_PATIENCE_S = 1.0  # how long prefill may take before its progress is shown
_PROGRESS_WIDTH = 60


class AnswerStream:
    """steps: of the answer's tokens. ttft_s: from `submitted` to the first text; None until there is some."""

    def __init__(self, submitted: float, *, echo: bool, quiet: bool) -> None:
        """echo: print the text. quiet: show no progress on standard error."""
        self._submitted = submitted
        self._echo = echo
        self._draws = can_redraw(sys.stderr) and not quiet
        self._sanitiser = Sanitiser()
        self._pieces: list[str] = []
        self._progress_drawn = False
        self.steps: list[Step] = []
        self.ttft_s: float | None = None
        self._finished: Finished | None = None

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def finished(self) -> Finished:
        """How it ended; there once `follow` has returned."""
        assert self._finished is not None
        return self._finished

    def follow(self, parts: Iterable[Part]) -> None:
        """Consume the answer to its end."""
        for part in parts:
            if isinstance(part, TextChunk | Completed):
                self._clear_progress()
                self._say(part.text)
                if isinstance(part, TextChunk):
                    self.steps.append(part.step)
                else:
                    self._finished = part.finished
                    self._end_line()
            else:
                self._draw_progress(part.done, part.total)

    def _say(self, text: str) -> None:
        if not text:
            return
        if self.ttft_s is None:
            self.ttft_s = time.perf_counter() - self._submitted
        self._pieces.append(text)
        if self._echo:
            sys.stdout.write(self._sanitiser.feed(text))
            sys.stdout.flush()

    def _end_line(self) -> None:
        if self._echo and self._pieces and not self._pieces[-1].endswith("\n"):
            sys.stdout.write("\n")
            sys.stdout.flush()

    def _draw_progress(self, done: int, total: int) -> None:
        if self._draws and time.perf_counter() - self._submitted > _PATIENCE_S:
            self._progress_drawn = True
            sys.stderr.write(f"\r{f'prefill {done} of {total} tokens':<{_PROGRESS_WIDTH}}")
            sys.stderr.flush()

    def _clear_progress(self) -> None:
        if self._progress_drawn:
            self._progress_drawn = False
            sys.stderr.write(f"\r{'':<{_PROGRESS_WIDTH}}\r")
            sys.stderr.flush()
