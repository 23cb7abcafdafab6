"""One engine process and the socket to it: start, send, receive without waiting, end.

The process is a fresh interpreter in a session of its own: no signal of the terminal reaches it, nothing it prints
reaches the terminal (it goes to a log file), and it leaves when this process does, however that happens, because
then the socket closes. It is started by `subprocess`, not by `multiprocessing`, which would hand the terminal down
and import this program's main module again.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from app.engine_messages import Command, Died, Event
from runtime.paths import cache_dir

_ROOT = Path(__file__).resolve().parent.parent
_LOG_LIMIT = 1 << 20  # bytes; a longer log is begun anew
_PATIENCE_S = 10.0  # for the kernel to take a killed process away


class EngineLink:
    """A running engine process. `drain` gives its events; after the last comes a Died, unless `kill` was called."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        log = _open_log()
        try:
            self._process = subprocess.Popen(
                # -P: a folder called `app` where the user happens to stand is not ours.
                [sys.executable, "-P", "-m", "app.engine_process", str(theirs.fileno())],
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        finally:
            theirs.close()
            os.close(log)
        self._connection = Connection(ours.detach())
        self._events: deque[Event] = deque()
        self._killed = False
        # Reads and unpickles as events come, so that `drain` only empties a deque: a process that is killed or
        # stopped in the middle of a message makes this thread wait, not the screen.
        self._reader = threading.Thread(target=self._read, name="engine-events", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, command: Command) -> None:
        """Hand a command over. To a process that is gone it is lost: Died tells."""
        with suppress(OSError):
            self._connection.send(command)

    def drain(self) -> list[Event]:
        """What has arrived since the last call."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def kill(self) -> None:
        """End the process now, without a Died, and wait until nothing of it is left."""
        self._killed = True
        self._process.kill()
        self._reader.join(_PATIENCE_S)

    def _read(self) -> None:
        try:
            while True:
                self._events.append(self._connection.recv())
        except Exception:  # the end of the stream, or bytes of a message that nobody finished
            self._process.kill()
            code = self._process.wait()
            self._connection.close()
            if not self._killed:
                self._events.append(Died(_obituary(code)))


def log_path() -> Path:
    """Where engine processes write what nobody wants on the screen."""
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


def _obituary(code: int) -> str:
    if code == -signal.SIGKILL:
        return "the engine was killed (SIGKILL); if you did not do it, the system was out of memory"
    if code < 0:
        return f"the engine crashed ({signal.Signals(-code).name}); {log_path()} may tell why"
    return f"the engine ended unexpectedly (exit code {code}); {log_path()} may tell why"
