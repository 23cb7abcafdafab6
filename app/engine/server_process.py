"""`headrace serve` as a child process, for commands that talk to a server of their own.

Guard: tests/app/cli/test_launch.py.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO

from headrace.runtime.config import environment
from headrace.runtime.errors import HeadraceError, UsageError

_END_S = 15.0  # for a server to end


@contextmanager
def server_process(arguments: Sequence[str], key: str | None) -> Iterator[str]:
    """Run a server on a free port during the block, and yield its address. It ends with this process, too.

    arguments: of `headrace serve`.
    key: that requests must have; None: none.
    Raises the error that the server ended with.
    """
    command = [sys.executable, "-m", "headrace", "serve", "--port", "0", "-q", "--parent", str(os.getpid())]
    variables = dict(os.environ)
    if key is not None:
        variables[environment.API_KEY] = key
    with tempfile.TemporaryFile() as errors:
        server = subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=variables,
            start_new_session=True,  # Ctrl-C is for the parent
        )
        try:
            yield announced_address(server, errors)
        finally:
            _end(server)


def announced_address(server: "subprocess.Popen[bytes]", errors: IO[bytes]) -> str:
    """Wait for the line with a server's address, and return it. Raises the error that the server ended with."""
    assert server.stdout is not None
    # The line is `headrace: MODEL at URL`, printed by `_announce` in cli/serve.py. The last " at " splits it: a
    # model's name may contain one, an address has no spaces. The line is empty if the server has ended before.
    _, at, url = server.stdout.readline().decode().strip().rpartition(" at ")
    if not at:
        code = server.wait(_END_S)
        message, hint = _last_error(errors)
        if code == UsageError.exit_code:
            raise UsageError(message, hint)
        raise HeadraceError(message, hint)
    return url


def _last_error(errors: IO[bytes]) -> tuple[str, str | None]:
    """Return the message and the hint that a server ended with."""
    errors.seek(0)
    lines: list[str] = [line.strip() for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
    hint = None
    if lines and lines[-1].startswith("hint: "):
        hint = lines.pop().removeprefix("hint: ")
    if not lines:
        return "the server ended unexpectedly", hint
    return lines[-1].removeprefix("headrace: "), hint


def _end(server: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):
        server.send_signal(signal.SIGINT)
    try:
        server.wait(_END_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    if server.stdout is not None:
        server.stdout.close()
