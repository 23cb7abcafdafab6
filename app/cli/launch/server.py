"""The server that an agent talks to: one that runs already, or a child process for the time of a block.

Guard: tests/app/cli/test_launch.py.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPException
from typing import IO
from urllib.parse import quote

from headrace.app.cli.launch.agents import Endpoint
from headrace.app.engine.http_address import HTTPAddress, ServerError
from headrace.runtime.config import environment
from headrace.runtime.errors import HeadraceError, UsageError

_ANSWER_S = 2.0  # for a running server to answer
_LOAD_S = 3600.0  # for a model to be loaded
_END_S = 15.0  # for a server to end
_OWNER = "headrace"  # `owned_by` of the models of our own server (`app.server.models`)


def find_endpoint(url: str, model: str | None, key: str | None) -> Endpoint | None:
    """Return a running server's model, loaded; None if no server of headrace is there, or if it lacks the model.

    model: None for the server's first one.
    Raises HeadraceError if the model cannot be loaded.
    """
    address = HTTPAddress(url, key)
    try:
        models = address.get("/v1/models", _ANSWER_S)["data"]
        ours = [served for served in models if served.get("owned_by") == _OWNER]
        wanted = (model or "").lower()
        name = next((str(served["id"]) for served in ours if wanted in ("", str(served["id"]).lower())), None)
    except (OSError, HTTPException, ValueError, TypeError, KeyError, AttributeError):
        return None
    if name is None:
        return None
    return _loaded(address, name, key)


def _loaded(address: HTTPAddress, name: str, key: str | None) -> Endpoint:
    """Have a server load a model, and return it with its context."""
    try:
        with suppress(ServerError):  # the request itself: a model without a chat template, say
            address.load_model(name, _LOAD_S)
        card = address.get(f"/v1/models/{quote(name)}", _LOAD_S)
        if card.get("status", {}).get("value") not in ("loaded", None):
            raise HeadraceError(f"{address.url}: {name} cannot be loaded", "the server's log says why")
        context = card.get("context_length")
        if not isinstance(context, int):
            context = None
        return Endpoint(address.url, name, context, key)
    except (OSError, HTTPException, ValueError, AttributeError) as error:
        raise HeadraceError(f"{address.url}: {error}") from error


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
            _end_server(server)


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


def _end_server(server: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):
        server.send_signal(signal.SIGINT)
    try:
        server.wait(_END_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    if server.stdout is not None:
        server.stdout.close()
