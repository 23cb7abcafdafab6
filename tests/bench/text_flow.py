"""Smoothness of streamed text on screen: gaps between writes with new text, and the chat's CPU share.

    python -m tests.bench.text_flow [--rounds 3] [--tokens 800] [--size 120x40] [--no-panel]

The chat answers greedily with the default model on a pseudo-terminal. Its output is assembled to the lines of the
conversation's column; a write has new text if one of them changes. The share of a core is that of the chat's process,
from the first new text to the last. Nothing here passes or fails.
"""

import argparse
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from headrace.runtime.metrics.telemetry import Percentiles
from tests.bench.ui_tax import Terminal, ask, newest_messages, prepare

_PLACE = re.compile(r"\x1b\[(\d+);(\d+)H")
_STYLE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
_BESIDE = 6  # lines of the screen's edges: status at the top, input and keys at the bottom


class Column:
    """The left `width` cells of a screen of `height` lines; `take` returns whether text in them is new."""

    def __init__(self, width: int, height: int) -> None:
        self._width, self._rows = width, range(2, height - _BESIDE + 1)
        self._lines: dict[int, str] = {}

    def take(self, written: str) -> bool:
        """Take terminal output, in whole sequences."""
        new = False
        parts = _PLACE.split(written)
        for row, column, text in zip(map(int, parts[1::3]), map(int, parts[2::3]), parts[3::3], strict=True):
            if row in self._rows and column <= self._width:
                before = self._lines.get(row, "")
                text = _STYLE.sub("", text)
                line = before[: column - 1].ljust(column - 1) + text + before[column - 1 + len(text) :]
                said = line[: self._width].rstrip("▍▐ ")
                new = new or (bool(said.strip()) and said not in self._lines.values())
                self._lines[row] = said
        return new


@dataclass(frozen=True, slots=True)
class Flow:
    """gaps: seconds between two writes with new text. share: of a core."""

    gaps: list[float]
    share: float
    seconds: float


def watch(terminal: Terminal, home: Path, column: Column) -> Flow:
    """Watch from the first text of an answer to its end."""
    times: list[float] = []
    pending = ""
    cpu: list[float] = []
    while True:
        data = terminal.read(1.0)
        if not data:
            if any(message.metrics for message in newest_messages(home)):
                break
            continue
        now = time.perf_counter()
        pending += data.decode(errors="replace")
        whole = max(pending.rfind("\x1b["), 0)
        written = pending[:whole]
        pending = pending[whole:]
        if column.take(written):
            times.append(now)
            cpu.append(terminal.cpu_seconds()[0])
    seconds = times[-1] - times[0]
    return Flow([late - early for early, late in pairwise(times)], (cpu[-1] - cpu[0]) / seconds, seconds)


def main() -> None:
    """Report answer by answer, then all gaps together."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--tokens", type=int, default=800)
    options.add_argument("--size", default="120x40")
    options.add_argument("--no-panel", action="store_true")
    given = options.parse_args()
    width, _, height = given.size.partition("x")
    gaps: list[float] = []
    for _ in range(given.rounds):
        with tempfile.TemporaryDirectory() as folder:
            home = Path(folder)
            env = prepare(home, given.tokens, panel=not given.no_panel)
            terminal = Terminal([sys.executable, "-m", "headrace", "chat"], (int(width), int(height)), env)
            try:
                ask(terminal)
                flow = watch(terminal, home, Column(int(width) // 2, int(height)))
                rate = next((m.metrics.decode_tokens_per_second for m in newest_messages(home) if m.metrics), None)
            finally:
                terminal.leave()
        gaps += flow.gaps
        taken = f"chat {flow.share:.2%} of a core over {flow.seconds:.1f} s; {rate or 0:.1f} tok/s"
        print(f"{_spread(flow.gaps)}; {taken}", flush=True)
    print(f"all: {_spread(gaps)}")


def _spread(gaps: list[float]) -> str:
    spread = Percentiles.of(gaps)
    if spread is None:
        return "no new text"
    often = f"new text {len(gaps) / sum(gaps):.1f} times a second"
    return f"{often}, gaps p50 {spread.p50 * 1e3:.0f} ms, p95 {spread.p95 * 1e3:.0f}, max {spread.max * 1e3:.0f}"


if __name__ == "__main__":
    main()
