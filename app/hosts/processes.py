"""Processes of the ranks from 1 on: started here or by ssh, watched, and ended in any case.

MLX's launcher makes the script that sets a rank's environment. The run's key goes over standard input, so no list of
processes shows it. The other end is `rank.py`; its docstring has the protocol; `start.py` drives both.

No rank may outlive rank 0: tests/app/hosts/test_kills.py kills, stops and cuts off ranks in each phase of a run.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from headrace.app.hosts.hostfile import Host
from headrace.app.output.sanitise import sanitise
from headrace.runtime.config import environment
from headrace.runtime.errors import EngineError, HeadraceError

_MODULE = "headrace.app.hosts.rank"
# MLX's script writes the process's id to a temporary file, which only MLX's launcher deletes (docs/workarounds.md).
_NO_FILE = "mktemp() { echo /dev/null; }; "
# For bash on another machine. $0 is the interpreter to use; where it does not exist, that of the installed command.
_REMOTE = (
    'p=$0; [ -x "$p" ] || { '
    'PATH=$("${SHELL:-/bin/bash}" -lc "printenv PATH" 2> /dev/null | tail -n 1):$PATH; '  # as in the user's own shell
    's=$(command -v headrace) || { echo "headrace is not installed, or not on the PATH" >&2; exit 127; }; '
    'p=$(head -n 1 "$s" | cut -c 3-); }; '  # the command is a script that begins with `#!` and its interpreter
    f'exec "$p" -P -m {_MODULE}'
)
_TRY = "try `ssh {} headrace --version`, which must ask for nothing"
_SSH_HINTS = {
    "Permission denied": "`ssh-copy-id {}`, so that ssh asks for no password",
    "Host key verification failed": "`ssh {}` by hand, and accept its key or remove an old one",
    "Connection refused": "turn on ssh there; on a Mac: System Settings, General, Sharing, Remote Login",
}
CONNECT_S = 4  # for ssh
SILENCE_S = 5.0  # without a heartbeat a process is lost
_POLL_S = 0.2  # between two looks at its silence
END_S = 2.0  # that a process gets to end by itself
AT_ONCE_S = 0.3  # the same, after an error
_MAX_ERROR_LINES = 20  # of standard error, for the reason of its end


class RankProcess:
    """One rank's process. Raises HeadraceError if it cannot be started."""

    def __init__(self, host: Host, env: Sequence[str]) -> None:
        from mlx._distributed_utils.launch import RemoteProcess

        self.host = host
        python = host.python or sys.executable
        run = [python, "-P", "-m", _MODULE]
        if not host.local:
            run = ["/bin/bash", "-c", _REMOTE, python]
        script = _NO_FILE + RemoteProcess.make_launch_script(host.rank, None, None, {}, list(env), run, is_local=True)
        command = ["/bin/bash", "-c", script]
        if not host.local:
            command = [*_ssh(host), f"/bin/bash -c {shlex.quote(script)}"]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # no signal of the terminal reaches it
                text=True,
                errors="replace",
            )
        except OSError as error:
            raise EngineError(f"{host.name} cannot be started: {error}", "is ssh installed?") from error
        self._error_lines: deque[str] = deque(maxlen=_MAX_ERROR_LINES)
        self._reports: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._last_line_at = time.monotonic()
        self._remote_pid = 0  # on its machine; 0 until its first heartbeat
        self._sending = threading.Lock()
        self._ordered = False  # it has its order: heartbeats are answered from then on
        self._readers = [
            threading.Thread(target=target, name=f"{target.__name__.strip('_')} {host.name}", daemon=True)
            for target in (self._read_output, self._read_errors)
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, order: Mapping[str, Any]) -> None:
        """Send a line of JSON; nothing happens if the process has ended."""
        assert self._process.stdin is not None
        with self._sending, suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            self._ordered = True

    def report(self, until: float) -> dict[str, Any]:
        """Return the process's report, and in it as `clock_offset` how far its clock is ahead. until: monotonic clock.

        Raises HeadraceError for a process that ends, is silent for SILENCE_S, or has not reported until then.
        """
        while True:
            with suppress(Empty):
                if (report := self._reports.get(timeout=_POLL_S)) is None:
                    raise self._gone()
                return report
            how = self.silent()
            if how is None and time.monotonic() > until:
                how = "has not reported"
            if how is not None:
                raise EngineError(f"{self.host.name} {how}", self._how_to_reach())

    def silent(self) -> str | None:
        """Return in words that no heartbeat has come; None if one has."""
        if time.monotonic() - self._last_line_at <= SILENCE_S:
            return None
        return f"has not been heard of for {SILENCE_S:.0f} s"

    def lost(self) -> str | None:
        """Return in words how the process ended, or that it is silent; None if it lives."""
        return self.ended() or self.silent()

    def ended(self, wait_s: float = 0.0) -> str | None:
        """Return how the process ended, in words; None if it runs."""
        try:
            code = self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return None
        for reader in self._readers:
            reader.join(END_S)
        text = f"ended with exit code {code}"
        if code < 0:
            text = f"ended by {signal.Signals(-code).name}"
        if last := next((line for line in reversed(self._error_lines) if line.strip()), ""):
            text += f": {last.removeprefix('headrace: ').strip():.300}"
        return text

    def close_input(self) -> None:
        """Close standard input, which ends the process, also on another machine."""
        assert self._process.stdin is not None
        with suppress(OSError, ValueError):
            self._process.stdin.close()

    def kill(self) -> None:
        """Kill the process at once, also on another machine, where it may be stopped."""
        if self._process.poll() is None and not self.host.local and self._remote_pid:
            with suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(
                    [*_ssh(self.host), f"kill -9 {self._remote_pid}"], timeout=END_S, capture_output=True, check=False
                )
        self._signal(signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)

    def terminate(self) -> None:
        """Ask the process to end, and those that it has started."""
        self._signal(signal.SIGTERM)

    def wait(self, until: float) -> bool:
        """Return whether the process has ended by this time of the monotonic clock."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, until - time.monotonic()))
            return True
        return False

    def close(self) -> None:
        """Close the pipes of a process that has ended, but for those that others hold, such as a master of ssh."""
        for reader, pipe in zip(self._readers, (self._process.stdout, self._process.stderr), strict=True):
            reader.join(AT_ONCE_S)
            if pipe is not None and not reader.is_alive():
                pipe.close()

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            with suppress(OSError):  # it has just ended
                os.killpg(self._process.pid, number)

    def _gone(self) -> HeadraceError:
        how = self.ended(END_S) or "closed its output"
        return EngineError(f"{self.host.name} cannot be started: it {how}", self._how_to_reach(how))

    def _how_to_reach(self, how: str = "") -> str | None:
        if self.host.local:
            return None
        hints = [hint for words, hint in _SSH_HINTS.items() if words in how]
        return (hints or [_TRY])[0].format(shlex.quote(self.host.ssh))

    def _read_output(self) -> None:
        """Take heartbeats, of which the first has the process's id, and the report; answer each once it has orders."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            # Other programs print on the same pipe, such as a shell its greeting: such lines are no documents.
            with suppress(ValueError, RecursionError, TypeError):
                if not isinstance(document := json.loads(line), dict):
                    continue
                self._last_line_at = time.monotonic()
                if "versions" in document:
                    now = time.time()
                    self._reports.put({**document, "clock_offset": document.get("clock", now) - now})
                elif isinstance(pid := document.get("pid"), int):
                    self._remote_pid = pid
                if self._ordered:
                    self.send({})
        self._reports.put(None)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._error_lines.append(line)
            if environment.debug():
                print(sanitise(f"{self.host.name}: {line}"), end="", file=sys.stderr, flush=True)


def end_all(processes: Sequence[RankProcess], *, grace_s: float) -> None:
    """End processes: those that do not end by themselves within `grace_s` are terminated, then killed."""
    for process in processes:
        process.close_input()
    until = time.monotonic() + grace_s
    remaining = [process for process in processes if not process.wait(until)]
    for process in remaining:
        process.terminate()
    until = time.monotonic() + min(grace_s, END_S / 2)
    for process in [process for process in remaining if not process.wait(until)]:
        process.kill()
    for process in processes:
        process.close()


def _ssh(host: Host) -> list[str]:
    options = ["BatchMode=yes", f"ConnectTimeout={CONNECT_S}", "LogLevel=ERROR"]
    options += ["ServerAliveInterval=2", "ServerAliveCountMax=3"]  # ssh ends after six seconds without its server
    return ["ssh", "-T", *(part for option in options for part in ("-o", option)), "--", host.ssh]
