"""One engine process and the socket to it: start, send and receive without waiting, end. There is no thread.

The process is a fresh interpreter in a session of its own: no signal of the terminal reaches it, nothing it prints
reaches the terminal (it goes to a log file), and it leaves when this process does, however that happens, because
then the socket closes. It is started by `subprocess`, not by `multiprocessing`, which would hand the terminal down
and import this program's main module again.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from headrace.app.engine.commands import Command, Quit
from headrace.app.engine.events import Died, Event
from headrace.app.engine.wire import CHUNK, Unpacker, pack, socket_pair
from headrace.runtime.config.paths import cache_dir
from headrace.runtime.machine.out_of_memory import HINT, reports_out_of_memory

_START = Path(__file__).with_name("start.py")
_LOG_LIMIT = 1 << 20  # bytes; a longer log is begun anew
_LAST_WORDS = 8 << 10  # bytes of it that are looked at when a process has died
_PATIENCE_S = 10.0  # for the kernel to take a killed process away
_GRACE_S = 1.0  # for a process that has hung up to end by itself, so that it tells how


class EngineLink:
    """A running engine process. `drain` gives its events; after the last comes a Died, unless `kill` was called."""

    def __init__(self) -> None:
        """Raises OSError where no process can be started."""
        self._socket, theirs = socket_pair()
        log = _open_log()
        self._log_from = os.lseek(log, 0, os.SEEK_END)  # what this process says begins there
        try:
            self._process = subprocess.Popen(
                # -P: nothing where the user happens to stand is ours.
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
            theirs.close()
            os.close(log)
        self._incoming = Unpacker()
        self._outgoing = bytearray()  # what the process has not taken yet
        self._unread: list[Event] = []  # what came after the last `drain`, at `kill`
        self._over: float | None = None  # when the stream ended
        self._exit_told = False  # by a Died, or because `kill` ended it
        self._why_killed = ""  # by us, in words; else nobody here did it

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, command: Command) -> None:
        """Hand a command over; what the process does not take now goes with the next calls, of `drain`, too.

        To a process that is gone it is lost: Died tells.
        """
        self._outgoing += pack(command)
        self._hand_over()

    @property
    def behind(self) -> bool:
        """Whether the process has not taken all that was sent: it is busy, or stopped."""
        return bool(self._outgoing)

    def drain(self) -> list[Event]:
        """What has arrived since the last call. Half a message stays where it is until the other half comes."""
        self._hand_over()
        events, self._unread = self._unread, []
        events += self._receive()
        if self._over is not None and not self._exit_told:
            if (code := self._process.poll()) is not None:
                self._exit_told = True
                events.append(Died(_exit_message(code, self._said(), self._why_killed)))
            elif time.monotonic() > self._over + _GRACE_S:
                self._kill_for("hung up and did not end")
        return events

    def quit(self, seconds: float) -> None:
        """Let the process write what it still has to, for at most so long, and end it. Then as `kill`."""
        deadline = time.monotonic() + seconds
        self.send(Quit(seconds))
        while self.behind and select.select([], [self._socket], [], max(0.0, deadline - time.monotonic()))[1]:
            self._hand_over()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End the process now, without a Died, and wait until nothing of it is left. `drain` gives what it had sent."""
        self._exit_told = True
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE_S)
        self._unread += self._receive()
        self._end()

    def _said(self) -> str:
        """The end of what the process wrote into the log."""
        try:
            with log_path().open("rb") as log:
                log.seek(max(self._log_from, log.seek(0, os.SEEK_END) - _LAST_WORDS))
                return log.read().decode(errors="replace")
        except OSError:
            return ""

    def _hand_over(self) -> None:
        try:
            while self._outgoing:
                del self._outgoing[: self._socket.send(self._outgoing, socket.MSG_DONTWAIT)]
        except BlockingIOError:
            pass
        except OSError:
            self._outgoing.clear()

    def _receive(self) -> list[Event]:
        events: list[Event] = []
        try:
            full = True
            while full and self._over is None:
                if piece := self._socket.recv(CHUNK, socket.MSG_DONTWAIT):
                    events += self._incoming.feed(piece)
                    full = len(piece) == CHUNK  # else that was all there is, but for the end: the next time finds it
                else:
                    self._end()
        except BlockingIOError:
            pass
        except OSError:  # the connection is broken, as by a death with something unread
            self._end()
        except Exception:  # what came was no message
            self._kill_for("said what means nothing")
            self._end()
        return events

    def _kill_for(self, why: str) -> None:
        self._why_killed = self._why_killed or why
        self._process.kill()

    def _end(self) -> None:
        self._over = time.monotonic()
        self._socket.close()


def _package() -> str:
    """The folder that this process has `headrace` from."""
    spec = find_spec("headrace")
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).parent)


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


def _exit_message(code: int, said: str, why_killed: str) -> str:
    if code == -signal.SIGABRT and reports_out_of_memory(said):  # a failed Metal command buffer
        return f"the engine's memory ran out; {HINT}"
    if code == -signal.SIGKILL and why_killed:
        return f"the engine {why_killed}, and was killed; {log_path()} may tell why"
    if code == -signal.SIGKILL:
        return "the engine was killed (SIGKILL); if you did not do it, the system was out of memory"
    if code < 0:
        return f"the engine crashed ({signal.Signals(-code).name}); {log_path()} may tell why"
    return f"the engine ended unexpectedly (exit code {code}); {log_path()} may tell why"
