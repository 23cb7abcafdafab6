"""`headrace chat` on a pseudo-terminal that is read as fast as it writes, for tests that kill it."""

import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_MODES = ((b"\x1b[?1049h", b"\x1b[?1049l"), (b"\x1b[?25l", b"\x1b[?25h"))  # the other screen, no cursor: on, off
_ESCAPES = re.compile(rb"\x1b\[[0-9;:?<>=]*[A-Za-z]")  # `\x1b[1;32m`, a colour; `\x1b[?25l`, a mode
_ROWS = 30
_COLUMNS = 100


class Chat:
    """`headrace chat` on a pseudo-terminal; `written` is everything it wrote to it. `first` is code run before it."""

    def __init__(self, home: Path, *arguments: str, first: str = "") -> None:
        self._ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, _COLUMNS, 0, 0))  # no size in pixels
        given = {"HEADRACE_HOME": str(home), "TERM": "xterm-256color"}
        self.process = self._start(["chat", *arguments], theirs, given, first)
        os.close(theirs)
        self.written = b""
        self._stalled = False
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _start(self, arguments: Sequence[str], terminal: int, environment: Mapping[str, str], first: str) -> Any:
        """Start the program in a new interpreter; return it as `subprocess` does. `tests.fuzz.forked` forks instead."""
        return subprocess.Popen(
            [sys.executable, "-c", f"{first}\nfrom headrace.app.cli.main import main\nmain()", *arguments],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
        )

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def tidy(self) -> bool:
        """Return whether the ended process restored the terminal: screen, cursor, line editing."""
        self._reader.join()
        ends = all(self.written.rfind(off) > self.written.rfind(on) for on, off in _MODES)
        local_modes = termios.tcgetattr(self._ours)[3]
        return ends and bool(local_modes & termios.ICANON)

    def shows(self, text: str) -> bool:
        return text.encode() in _ESCAPES.sub(b"", self.written)

    def close(self) -> None:
        """Close the terminal, as a window or a connection is closed."""
        self._stalled = True
        self._reader.join()
        os.close(self._ours)

    def stall(self) -> None:
        """Stop reading."""
        self._stalled = True

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        os.close(self._ours)

    def _read(self) -> None:
        while not self._stalled:
            if not select.select([self._ours], [], [], 0.1)[0]:
                continue
            try:
                self.written += os.read(self._ours, 1 << 16)
            except OSError:  # how Linux says that the other end is closed
                return
