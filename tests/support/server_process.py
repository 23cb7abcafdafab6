"""`headrace serve` as a process: its address, its end, and what it printed."""

import os
import re
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx2 as httpx

from tests.support.commands import HEADRACE, ForkedProcess
from tests.support.patience import PATIENCE_S

_LINE = re.compile(r"headrace: (\S+) at (http://\S+)/v1\n")


class ServerProcess:
    """A server on a free port, with the model loaded unless `wait` is false. root: its URL without /v1."""

    def __init__(self, home: Path, *arguments: str, wait: bool = True, **environment: str) -> None:
        home.mkdir(exist_ok=True)
        variables = {**os.environ, "HEADRACE_HOME": str(home), **environment}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - until the end of the process
        self.process = ForkedProcess(
            [*HEADRACE, "serve", "--port", "0", *arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._errors, env=variables, text=True,
        )  # fmt: skip
        self.root = self.name = ""
        if wait:
            self.await_line()

    def await_line(self) -> None:
        """Wait for the line that says where it listens."""
        assert self.process.stdout is not None
        found = _LINE.fullmatch(line := self.process.stdout.readline())
        assert found is not None, (line, self.errors)
        self.name, self.root = found[1], found[2]

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._errors.close()

    @property
    def errors(self) -> str:
        """Return its standard error."""
        self._errors.seek(0)
        return self._errors.read().decode()

    def end(self, number: signal.Signals) -> int:
        """Send a signal, and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)

    def health(self) -> dict[str, Any]:
        """Return its health."""
        found: dict[str, Any] = httpx.get(f"{self.root}/health", timeout=PATIENCE_S).json()
        return found

    def until(self, **wanted: Any) -> None:
        """Wait until its health has these values."""
        deadline = time.monotonic() + PATIENCE_S
        while not wanted.items() <= (found := self.health()).items():
            assert time.monotonic() < deadline, found
            time.sleep(0.01)
