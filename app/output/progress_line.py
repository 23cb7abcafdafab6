"""How far long work is, on standard error: a line drawn over itself on a terminal, a line a stage elsewhere."""

import sys
import time

from headrace.app.output.sanitise import sanitise
from headrace.app.output.terminal import can_redraw

_EVERY_S = 0.1


class ProgressLine:
    """Told what is being done, one `what` of several, and between any two steps that it goes on."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._draws = can_redraw(sys.stderr)
        self._started = time.monotonic()
        self._drawn_at = 0.0
        self._text = ""
        self._width = 0

    def begin(self, number: int, of: int, name: str) -> None:
        """The `number`-th of so many."""
        self._text = sanitise(f"{self._what} {number} of {of}: {name}")
        if self._draws:
            self.tick()
        else:
            print(f"{self._text} ...", file=sys.stderr, flush=True)

    def tick(self) -> None:
        """A step was made."""
        now = time.monotonic()
        if not self._draws or now - self._drawn_at < _EVERY_S:
            return
        self._drawn_at = now
        line = f"{self._text} · {now - self._started:.0f} s"
        sys.stderr.write(f"\r{line:<{self._width}}")
        sys.stderr.flush()
        self._width = len(line)

    def clear(self) -> None:
        """Take the line away."""
        if self._width:
            sys.stderr.write(f"\r{'':<{self._width}}\r")
            sys.stderr.flush()
            self._width = 0
