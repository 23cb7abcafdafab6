"""The server of `headrace launch`: one that runs already, or one of its own that ends with it."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from signal import SIGINT
from typing import IO, Any
from urllib.parse import quote

from headrace.app.cli.launch.agents import Endpoint
from headrace.app.cli.say import say
from headrace.app.engine.http_address import HTTPAddress, ServerError
from headrace.runtime.config import environment
from headrace.runtime.errors import HeadraceError, UsageError

_LOOK_S = 2.0  # for a running server to answer
_LOAD_S = 3600.0  # for a model to be loaded
_END_S = 15.0  # for a server to end
_OWNER = "headrace"


def find_endpoint(url: str, model: str | None, key: str | None) -> Endpoint | None:
    """Return a running server's model, loaded; None if no server of headrace is there, or if it lacks the model.

    model: None for the server's first one.
    Raises HeadraceError if the model cannot be loaded.
    """
    address = HTTPAddress(url, key)
    try:
        models = address.get("/v1/models", _LOOK_S)["data"]
        own = [found for found in models if found.get("owned_by") == _OWNER]
        wanted = (model or "").lower()
        name = next((str(found["id"]) for found in own if wanted in ("", str(found["id"]).lower())), None)
    except (OSError, HTTPException, ValueError, TypeError, KeyError, AttributeError):
        return None
    return None if name is None else _loaded(address, name, key)


def _loaded(address: HTTPAddress, name: str, key: str | None) -> Endpoint:
    """Have a server load a model, and return it with its context."""
    try:
        with suppress(ServerError):  # the request itself: a model without a chat template, say
            address.load_model(name, _LOAD_S)
        found = address.get(f"/v1/models/{quote(name)}", _LOAD_S)
        if found.get("status", {}).get("value") not in ("loaded", None):
            raise HeadraceError(f"{address.url}: {name} cannot be loaded", "the server's log says why")
        context = found.get("context_length")
        return Endpoint(address.url, name, context if isinstance(context, int) else None, key)
    except (OSError, HTTPException, ValueError, AttributeError) as error:
        raise HeadraceError(f"{address.url}: {error}") from error


@contextmanager
def own_server(model: str | None, key: str | None) -> Iterator[Endpoint]:
    """Run a server on a free port during the block. Raises HeadraceError with the server's last line if it fails."""
    command = [sys.executable, "-m", "headrace", "serve", "--port", "0", "-q", "--parent", str(os.getpid())]
    command += ["-m", model] if model is not None else []
    with tempfile.TemporaryFile() as errors:
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=os.environ if key is None else {**os.environ, environment.API_KEY: key},
            start_new_session=True,  # Ctrl-C is for the agent
        )
        try:
            say(f"headrace: loading {model or 'the default model'}", err=True)
            yield _announced(server, errors, key)
        finally:
            _end(server)


def _announced(server: "subprocess.Popen[bytes]", errors: IO[bytes], key: str | None) -> Endpoint:
    """Wait for the line with a server's address, and return its model. Raises the error that the server ended with."""
    assert server.stdout is not None
    _, at, url = server.stdout.readline().decode().strip().rpartition(" at ")
    if not at:
        kind = UsageError if server.wait(_END_S) == UsageError.exit_code else HeadraceError
        raise kind(*_last_error(errors))
    endpoint = find_endpoint(url, None, key)
    if endpoint is None:
        raise HeadraceError(f"{url} does not answer", "`headrace serve` says why")
    return endpoint


def _last_error(errors: IO[bytes]) -> tuple[str, str | None]:
    """Return the message and the hint that a server ended with."""
    errors.seek(0)
    lines: list[str] = [line.strip() for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
    hint = lines.pop().removeprefix("hint: ") if lines and lines[-1].startswith("hint: ") else None
    return (lines[-1].removeprefix("headrace: ") if lines else "the server ended unexpectedly"), hint


def _end(server: "subprocess.Popen[Any]") -> None:
    with suppress(ProcessLookupError):
        server.send_signal(SIGINT)
    try:
        server.wait(_END_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    if server.stdout is not None:
        server.stdout.close()
