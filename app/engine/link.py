"""One engine process and its socket: start, non-blocking send and receive, end. No thread.

The process is a fresh interpreter in a session of its own: no signal of the terminal reaches it, and its output goes to
a log file. It exits when the socket closes, however this process ends. `multiprocessing` would pass the terminal down
and import this program's main module again; `subprocess` does not.

Guard: tests/app/engine/test_link.py.
"""

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from headrace.app.engine.commands import EngineCommand, Quit
from headrace.app.engine.events import Died, Event
from headrace.app.engine.wire import Channel, socket_pair
from headrace.runtime.config.paths import cache_dir

_START = Path(__file__).with_name("start.py")
_LOG_LIMIT = 1 << 20  # bytes; a longer log is truncated
_LOG_TAIL = 8 << 10  # bytes read after a process has died
_REAP_S = 10.0  # for a killed process to disappear
LOST_RANK = "rank "
"""Begins the message of an engine that ended because of another rank: `hosts.start.say_lost` prints it to the log."""
_GRACE_S = 1.0  # for a process that closed its socket to exit


class EngineLink(Channel[EngineCommand, Event]):
    """A running engine process. The last event of `drain` is a Died, unless `kill` was called.

    `EngineClient` has one for the model, and one for each download.
    """

    def __init__(self) -> None:
        """Raises OSError if no process can be started."""
        ours, theirs = socket_pair()
        super().__init__(ours)
        log = _open_log()
        self._log_from = os.lseek(log, 0, os.SEEK_END)  # this process's output begins there
        try:
            self._process = subprocess.Popen(
                # -P: no imports from the working directory.
                [sys.executable, "-P", str(_START), _package(), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()  # the child has a copy; with ours open, its end would not close the connection
            os.close(log)
        self._unread: list[Event] = []  # events received by `kill`
        self._exit_reported = False  # by a Died, or by `kill`
        self._kill_reason = ""  # of our own kill

    @property
    def pid(self) -> int:
        return self._process.pid

    def drain(self) -> list[Event]:
        """Return the events that have arrived."""
        self.flush()
        events = self._unread
        self._unread = []
        events += self.receive()
        if self.is_garbled:
            self._kill_for("sent invalid data")
        if self.ended_at is not None and not self._exit_reported:
            if (code := self._process.poll()) is not None:
                self._exit_reported = True
                events.append(Died(_exit_message(code, self._log_tail(), self._kill_reason)))
            elif time.monotonic() > self.ended_at + _GRACE_S:
                self._kill_for("closed its connection and did not exit")
        return events

    def quit(self, seconds: float) -> None:
        """Let the process write K/V to disk for at most `seconds`, then `kill` it."""
        deadline = time.monotonic() + seconds
        self.send(Quit(seconds))
        while self.has_unsent and select.select([], [self._socket], [], max(0.0, deadline - time.monotonic()))[1]:
            self.flush()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()  # if it still runs; else this reaps it

    def kill(self) -> None:
        """Kill the process, without a Died, and wait for its end; `drain` still returns its events."""
        self._exit_reported = True
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_S)
        self._unread += self.receive()
        self.end()

    def _log_tail(self) -> str:
        """Return the end of the process's log."""
        try:
            with log_path().open("rb") as log:
                log.seek(max(self._log_from, log.seek(0, os.SEEK_END) - _LOG_TAIL))
                return log.read().decode(errors="replace")
        except OSError:
            return ""

    def _kill_for(self, reason: str) -> None:
        self._kill_reason = self._kill_reason or reason
        self._process.kill()


def _package() -> str:
    """Return the folder of this process's `headrace`."""
    spec = find_spec("headrace")
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).parent)


def log_path() -> Path:
    """Return the path of the engine processes' output."""
    return cache_dir() / "engine.log"


def _open_log() -> int:
    path = log_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        if path.exists() and path.stat().st_size > _LOG_LIMIT:
            flags |= os.O_TRUNC
        return os.open(path, flags, 0o600)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


def _exit_message(code: int, log: str, kill_reason: str) -> str:
    """Return why the process ended, in one line.

    code: its exit code; negative for a signal.
    log: the end of its log.
    kill_reason: of our own kill; "" without.
    """
    from headrace.runtime.machine.out_of_memory import METAL_HINT, reports_out_of_memory  # not before the first frame

    if code == -signal.SIGABRT and reports_out_of_memory(log):  # a failed Metal command buffer
        return f"the engine's memory ran out; {METAL_HINT}"
    # Not only at the beginning of a line: MLX's ring may have written the first part of one.
    _, lost, log_after = log.rpartition(f"headrace: {LOST_RANK}")
    if lost and code == 1:
        reason, *_ = log_after.splitlines() or [""]
        return f"{LOST_RANK}{reason}; this machine goes on alone"
    if code == -signal.SIGKILL and kill_reason:
        return f"the engine {kill_reason}, and was killed; {log_path()} may tell why"
    if code == -signal.SIGKILL:
        return "the engine was killed (SIGKILL); if you did not do it, the system was out of memory"
    if code < 0:
        return f"the engine crashed ({signal.Signals(-code).name}); {log_path()} may tell why"
    return f"the engine ended unexpectedly (exit code {code}); {log_path()} may tell why"
