"""What the chat's screen costs: decode speed inside the real app against `headrace run`, and key press to echo.

    python -m tests.bench.ui_tax [--rounds 5] [--tokens 200] [--size 120x40] [--no-panel]

Both sides answer the same prompt greedily with the default model, taking turns, each in a process of its own. The
app runs on a pseudo-terminal that is read as fast as it writes. Its tok/s are those it stored with the answer. For
the echo, letters that no answer holds are typed while the answer streams, and awaited in the terminal's output.
A benchmark for people: nothing here passes or fails.
"""

import argparse
import fcntl
import json
import os
import pty
import select
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

from app.sessions.store import SessionStore
from runtime.paths import cache_dir, data_dir
from runtime.telemetry import Percentiles

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "Write a long story about a river, a mill and the people who live beside it."
LETTERS = "жщыэюяфцчшбдё"
_KEY_EVERY_S = 0.15
_PATIENCE_S = 180.0


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
        """What came within `wait_s`, empty if nothing did; the first bytes end the waiting."""
        if not select.select([self._fd], [], [], wait_s)[0]:
            return b""
        try:
            return os.read(self._fd, 1 << 16)
        except OSError:
            return b""

    def read_until(self, mark: bytes, patience_s: float = _PATIENCE_S) -> float:
        """Seconds until `mark` was written. Raises TimeoutError."""
        began, seen = time.perf_counter(), b""
        while time.perf_counter() - began < patience_s:
            seen = seen[-4096:] + self.read(0.5)
            if mark in seen:
                return time.perf_counter() - began
        raise TimeoutError(f"{mark!r} did not appear")

    def cpu_seconds(self) -> float:
        """Processor time of the program so far (not of the engine's process); 0 where /proc is missing."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        self.type("\x11")  # Ctrl+Q
        began = time.perf_counter()
        while os.waitpid(self.pid, os.WNOHANG) == (0, 0):
            self.read(0.05)
            if time.perf_counter() - began > 10:
                os.kill(self.pid, signal.SIGKILL)
        os.close(self._fd)


def prepare(home: Path, tokens: int, *, panel: bool) -> dict[str, str]:
    """A home of its own that shares the models and the calibration; the environment that uses it."""
    (home / "data").mkdir()
    (home / "config").mkdir()
    (home / "data" / "models").symlink_to(data_dir() / "models")
    (home / "cache").symlink_to(cache_dir())
    settings = f"[sampling]\ntemperature = 0.0\nmax_tokens = {tokens}\n[screen]\ndecode_view = {str(panel).lower()}\n"
    (home / "config" / "settings.toml").write_text(settings)
    return {**os.environ, "HEADRACE_HOME": str(home), "TERM": "xterm-256color", "COLORTERM": "truecolor"}


def in_app(home: Path, env: dict[str, str], size: tuple[int, int], *, typing: bool) -> tuple[float, list[float], float]:
    """(decode tok/s, seconds from key to echo, share of one core that the screen's process took) of one answer."""
    terminal = Terminal([sys.executable, "-m", "app", "chat"], size, env)
    echoes: list[float] = []
    try:
        terminal.read_until(b"loaded in")
        terminal.type(PROMPT)
        terminal.read_until(b"beside it.")
        terminal.type("\r")
        terminal.read_until(b"answering")
        began, busy = time.perf_counter(), terminal.cpu_seconds()
        while typing and len(echoes) < 40 and _answering(home):
            letter = LETTERS[len(echoes) % len(LETTERS)]
            terminal.type(letter)
            echoes.append(terminal.read_until(letter.encode(), 5.0))
            until = time.perf_counter() + _KEY_EVERY_S
            while (left := until - time.perf_counter()) > 0:
                terminal.read(left)
        while _answering(home) and time.perf_counter() - began < _PATIENCE_S:
            terminal.read(0.2)
        share = (terminal.cpu_seconds() - busy) / (time.perf_counter() - began)
        rate = _stored_rate(home)
    finally:
        terminal.end()
    return rate, echoes, share


def _answering(home: Path) -> bool:
    return _stored_rate(home) == 0.0


def _stored_rate(home: Path) -> float:
    """tok/s stored with the newest answer, 0 while it is being written."""
    store = SessionStore(home / "data" / "sessions.db")
    try:
        newest = store.sessions(1)
        messages = store.branch(newest[0].session.id) if newest else []
    finally:
        store.close()
    figures = messages[-1].figures if messages else None
    return figures.decode_tokens_per_second or 0.0 if figures else 0.0


def in_run(tokens: int, env: dict[str, str]) -> float:
    """Decode tok/s of the same answer from `headrace run`."""
    command = [sys.executable, "-m", "app", "run", PROMPT, "-n", str(tokens), "-t", "0", "--json"]
    done = subprocess.run(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    return float(json.loads(done.stdout)["decode_tokens_per_second"])


def main() -> None:
    """Take turns and report medians."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--tokens", type=int, default=200)
    options.add_argument("--size", default="120x40")
    options.add_argument("--no-panel", action="store_true")
    given = options.parse_args()
    width, _, height = given.size.partition("x")
    size = (int(width), int(height))
    plain, inside, echoes = [], [], []
    for number in range(given.rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            home = Path(folder)
            env = prepare(home, given.tokens, panel=not given.no_panel)
            plain.append(in_run(given.tokens, env))
            typing = number == given.rounds  # the last round types, and does not count for the speed
            rate, seconds, share = in_app(home, env, size, typing=typing)
            echoes += seconds
            if typing:
                plain.pop()
            else:
                inside.append(rate)
                sides = f"run {plain[-1]:.1f} tok/s, app {rate:.1f} tok/s"
                print(f"{sides}: {rate / plain[-1]:.1%}; screen {share:.1%} of a core", flush=True)
    ratio = statistics.median(inside) / statistics.median(plain)
    print(f"median: run {statistics.median(plain):.1f}, app {statistics.median(inside):.1f} tok/s: {ratio:.1%}")
    if (spread := Percentiles.of(echoes)) is not None:
        figures = f"p50 {spread.p50 * 1e3:.1f}, p95 {spread.p95 * 1e3:.1f}, max {spread.max * 1e3:.1f} ms"
        print(f"key press to echo while decoding ({len(echoes)} keys): {figures}")


if __name__ == "__main__":
    main()
