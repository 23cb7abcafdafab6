"""Cost of the screen: decode speed in the app against `headrace run`, key press to echo, first frame.

    python -m tests.bench.ui_tax [--rounds 5] [--tokens 1500] [--size 120x40] [--no-panel] [--pauses]

All answer the same prompt greedily with the default model, alternating, each in its own process: the app and `headrace
run` on a pseudo-terminal that is read as fast as they write, and `headrace run --json`, which writes at the end only.
The app's tok/s are those stored with the answer. On a busy machine compare the CPU shares first. For the echo, letters
that no answer contains are typed while the answer streams, and awaited in the terminal's output.

`--pauses` is sharper (Linux only): within one answer the screen's process is stopped and continued every half second,
and the engine's text pieces are counted in both states, from a trace of the engine's process (`tests.faults.trace`).
The first moments of each state do not count: a continued screen first draws everything that came meanwhile.
Nothing here passes or fails.
"""

import argparse
import fcntl
import json
import os
import pty
import re
import select
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.app.sessions.records import Message
from headrace.app.sessions.store import SessionStore
from headrace.runtime.config.paths import cache_dir, data_dir
from headrace.runtime.metrics.telemetry import Percentiles
from tests.faults.trace import generated, traced_path

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "Write a long story about a river, a mill and the people who live beside it."
LETTERS = "жщыэюяфцчшбдё"
_KEYS = 40
_KEY_EVERY_S = 0.15
_PATIENCE_S = 180.0
_STATE_S = 0.5  # so long it is counted with the screen's process stopped, or running
_SETTLE_S = 0.2  # before that
_STATES = 40  # an answer; whole pairs


class Terminal:
    """A program on a pseudo-terminal of a given size."""

    def __init__(self, command: list[str], size: tuple[int, int], env: dict[str, str]) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.chdir(ROOT)
            os.execvpe(command[0], command, env)
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def read(self, wait_s: float) -> bytes:
        """Read for up to `wait_s`, until the first bytes."""
        if not select.select([self._fd], [], [], wait_s)[0]:
            return b""
        try:
            return os.read(self._fd, 1 << 16)
        except OSError:
            return b""

    def read_for(self, seconds: float) -> None:
        """Read and discard output for this time."""
        until = time.perf_counter() + seconds
        while (left := until - time.perf_counter()) > 0:
            self.read(left)

    def read_until(self, mark: bytes, patience_s: float = _PATIENCE_S) -> float:
        """Return seconds until `mark` was written. Raises TimeoutError."""
        began = time.perf_counter()
        seen = b""
        while time.perf_counter() - began < patience_s:
            seen = seen[-4096:] + self.read(0.5)
            if mark in seen:
                return time.perf_counter() - began
        raise TimeoutError(f"{mark!r} did not appear")

    @property
    def engine(self) -> int | None:
        """The engine's process, the program's only child; None without /proc."""
        try:
            return int(Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()[0])
        except (OSError, IndexError):
            return None

    def cpu_seconds(self) -> tuple[float, float]:
        """Return the CPU time of the program and of the engine's process; 0 without /proc."""
        return _cpu_seconds(self.pid), _cpu_seconds(self.engine) if self.engine is not None else 0.0

    def leave(self) -> None:
        """Press Ctrl+Q and wait for the exit."""
        self.type("\x11")
        self.end(10.0)

    def end(self, patience_s: float = _PATIENCE_S) -> None:
        """Read until the program exits, within this time."""
        began = time.perf_counter()
        while os.waitpid(self.pid, os.WNOHANG) == (0, 0):
            self.read(0.05)
            if time.perf_counter() - began > patience_s:
                os.kill(self.pid, signal.SIGKILL)
        os.close(self._fd)


def prepare(home: Path, tokens: int, *, panel: bool) -> dict[str, str]:
    """Make a home that shares models and calibration; returns its environment."""
    (home / "data").mkdir()
    (home / "config").mkdir()
    (home / "data" / "models").symlink_to(data_dir() / "models")
    (home / "cache").symlink_to(cache_dir())
    sampling = f'[sampling]\ntemperature = 0.0\nmax_tokens = {tokens}\nspeculate = "off"\n'  # a step is a token
    settings = f"{sampling}[screen]\ndecode_view = {str(panel).lower()}\n"
    (home / "config" / "settings.toml").write_text(settings)
    return {**os.environ, "HEADRACE_HOME": str(home), "TERM": "xterm-256color", "COLORTERM": "truecolor"}


@dataclass(frozen=True, slots=True)
class InApp:
    """One answer in the app. Shares are of one core during streaming; echoes are seconds from key to screen."""

    rate: float
    first_frame_s: float
    screen_share: float
    engine_share: float
    echoes: list[float]


def in_app(home: Path, env: dict[str, str], size: tuple[int, int], *, typing: bool) -> InApp:
    """Start the app, ask and watch; `typing` during the answer."""
    terminal = Terminal([sys.executable, "-m", "headrace", "chat"], size, env)
    echoes: list[float] = []
    try:
        first_frame = ask(terminal)
        began = time.perf_counter()
        before = terminal.cpu_seconds()
        while typing and len(echoes) < _KEYS and _answering(home):
            letter = LETTERS[len(echoes) % len(LETTERS)]
            terminal.type(letter)
            echoes.append(terminal.read_until(letter.encode(), 5.0))
            terminal.read_for(_KEY_EVERY_S)
        # A screen that stands still tells the end: to ask the database all the time would take what is measured.
        last = time.perf_counter()
        while ((drawn := terminal.read(1.0)) or _answering(home)) and last - began < _PATIENCE_S:
            last = time.perf_counter() if drawn else last
        took = last - began
        after = terminal.cpu_seconds()
        screen, engine = ((late - early) / took for early, late in zip(before, after, strict=True))
        return InApp(_stored_rate(home), first_frame, screen, engine, echoes)
    finally:
        terminal.leave()


def with_pauses(home: Path, env: dict[str, str], size: tuple[int, int]) -> tuple[float, float]:
    """Return pieces of text per second in one answer, with the screen's process running and stopped."""
    terminal = Terminal([sys.executable, "-m", "headrace", "chat"], size, {**env, "PYTHONPATH": traced_path()})
    pieces = [0, 0]
    seconds = [0.0, 0.0]
    try:
        ask(terminal)
        terminal.read_for(2 * _STATE_S)
        for turn in range(_STATES):
            stopped = turn % 4 in (1, 2)  # in the order of a slope that evens out: the context grows
            os.kill(terminal.pid, signal.SIGSTOP if stopped else signal.SIGCONT)
            terminal.read_for(_SETTLE_S)
            before = _pieces(home)
            began = time.perf_counter()
            terminal.read_for(_STATE_S)
            after = _pieces(home)
            ended = time.perf_counter()
            pieces[stopped] += after - before
            seconds[stopped] += ended - began
        return pieces[0] / seconds[0], pieces[1] / seconds[1]
    finally:
        os.kill(terminal.pid, signal.SIGCONT)
        terminal.leave()


def ask(terminal: Terminal) -> float:
    """Send the question and wait for the answer to begin; returns seconds to the first frame."""
    first_frame = terminal.read_until(b"message, or")
    terminal.read_until(b"loaded in")
    terminal.type(PROMPT)
    terminal.read_until(b"beside it.")
    terminal.type("\r")
    terminal.read_until(b"answering")
    return first_frame


def _pieces(home: Path) -> int:
    """Return the number of pieces generated for the one answer."""
    return sum(map(len, generated(home)))


def _answering(home: Path) -> bool:
    return _stored_rate(home) == 0.0


def newest_messages(home: Path) -> list[Message]:
    """Return the shown branch of the newest session; empty if there is none."""
    store = SessionStore(home / "data" / "sessions.db")
    try:
        newest = store.sessions(1)
        return store.branch(newest[0].session.id) if newest else []
    finally:
        store.close()


def _stored_rate(home: Path) -> float:
    """Return the tok/s stored with the newest answer, 0 while it is unfinished."""
    messages = newest_messages(home)
    metrics = messages[-1].metrics if messages else None
    return metrics.decode_tokens_per_second or 0.0 if metrics else 0.0


def _cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def in_run(tokens: int, env: dict[str, str]) -> float:
    """Return the decode tok/s of the same answer from `headrace run --json`."""
    command = [*_run(tokens), "--json"]
    done = subprocess.run(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    return float(json.loads(done.stdout)["decode_tokens_per_second"])


def in_streaming_run(home: Path, tokens: int, env: dict[str, str], size: tuple[int, int]) -> float:
    """Return the decode tok/s of the same answer from `headrace run`, streamed to a terminal."""
    stats = home / "stats"
    terminal = Terminal(["sh", "-c", '"$@" 2>"$0"', str(stats), *_run(tokens), "--stats"], size, env)
    terminal.end()
    rate = re.search(r"^decode +([\d.]+) tok/s", stats.read_text(), re.MULTILINE)
    if rate is None:
        raise RuntimeError(stats.read_text())
    return float(rate[1])


def _run(tokens: int) -> list[str]:
    return [sys.executable, "-m", "headrace", "run", PROMPT, "-n", str(tokens), "-t", "0", "--speculate", "off"]


def main() -> None:
    """Alternate and report medians."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--tokens", type=int, default=1500)
    options.add_argument("--size", default="120x40")
    options.add_argument("--no-panel", action="store_true")
    options.add_argument("--pauses", action="store_true")
    given = options.parse_args()
    width, _, height = given.size.partition("x")
    size = (int(width), int(height))
    if given.pauses:
        report_pauses(given.rounds, size, panel=not given.no_panel)
    else:
        report_pairs(given.rounds, given.tokens, size, panel=not given.no_panel)


def report_pauses(rounds: int, size: tuple[int, int], *, panel: bool) -> None:
    """Print one ratio per answer, then their mean with its uncertainty."""
    ratios = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            running, stopped = with_pauses(Path(folder), prepare(Path(folder), 8000, panel=panel), size)
        ratios.append(running / stopped)
        print(f"engine {running:.1f}/s, while the screen is stopped {stopped:.1f}/s: {ratios[-1]:.1%}", flush=True)
    print(f"with the screen / without: {_spread(ratios)}")


def report_pairs(rounds: int, tokens: int, size: tuple[int, int], *, panel: bool) -> None:
    """Compare the app and `headrace run` twice, in alternating order; then one answer in the app during typing."""
    took: list[tuple[InApp, float, float]] = []
    for number in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            home = Path(folder)
            env = prepare(home, tokens, panel=panel)
            app, shown, silent = in_turn(
                number,
                lambda home=home, env=env: in_app(home, env, size, typing=False),
                lambda home=home, env=env: in_streaming_run(home, tokens, env, size),
                lambda env=env: in_run(tokens, env),
            )
        took.append((app, shown, silent))
        runs = f"run {shown:.1f} ({app.rate / shown:.1%}), run --json {silent:.1f} ({app.rate / silent:.1%})"
        shares = f"screen {app.screen_share:.1%}, engine {app.engine_share:.0%}"
        print(f"tok/s: app {app.rate:.1f}, {runs}; of a core: {shares}", flush=True)
    with tempfile.TemporaryDirectory() as folder:  # does not count for the speed; all keys while it decodes
        echoes = in_app(Path(folder), prepare(Path(folder), 2 * tokens, panel=panel), size, typing=True).echoes
    if (spread := Percentiles.of(echoes)) is not None:
        figures = f"p50 {spread.p50 * 1e3:.1f}, p95 {spread.p95 * 1e3:.1f}, max {spread.max * 1e3:.1f} ms"
        print(f"key press to echo while decoding ({len(echoes)} keys): {figures}")
    print(f"app / run: {_spread([app.rate / shown for app, shown, _ in took])}")
    print(f"app / run --json: {_spread([app.rate / silent for app, _, silent in took])}")
    share, frame = (
        statistics.median(x) for x in zip(*((a.screen_share, a.first_frame_s) for a, *_ in took), strict=True)
    )
    print(f"medians: screen {share:.1%} of a core, first frame {frame:.2f} s")


def in_turn(first: int, *sides: Callable[[], Any]) -> list[Any]:
    """Return the result of every side, in the order given; each round starts with another one."""
    results: dict[int, Any] = {}
    for step in range(len(sides)):
        place = (first + step) % len(sides)
        results[place] = sides[place]()
    return [results[place] for place in range(len(sides))]


def _spread(ratios: list[float]) -> str:
    error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
    return f"mean {statistics.mean(ratios):.1%}, standard error {error:.1%}, median {statistics.median(ratios):.1%}"


if __name__ == "__main__":
    main()
