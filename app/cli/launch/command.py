"""`headrace launch`: a coding agent on a model of this machine, with settings for this run alone.

The agent talks to a server that runs already, or to one of its own, which ends with it.

Guard: tests/app/cli/test_launch.py.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from types import FrameType
from typing import IO
from urllib.parse import quote

import click

from headrace.app.cli.launch.agents import AGENTS, Endpoint
from headrace.app.cli.model_options import model_option
from headrace.app.cli.say import say
from headrace.app.cli.serve import PORT
from headrace.app.engine.http_address import HTTPAddress, ServerError
from headrace.runtime.config import environment
from headrace.runtime.errors import HeadraceError, UsageError

_ANSWER_S = 2.0  # for a running server to answer
_LOAD_S = 3600.0  # for a model to be loaded
_OWNER = "headrace"  # `owned_by` of the models of our own server (`app.server.models`)
_AGENT_END_S = 5.0  # for an agent to end after SIGTERM
_SERVER_END_S = 15.0  # for a server to end


# click's default, stated since ARGS is unprocessed: an unknown option before `--` is an error, not the agent's.
@click.command(context_settings={"ignore_unknown_options": False})
@click.argument("agent", metavar="AGENT", type=click.Choice(list(AGENTS)))
@model_option
@click.option(
    "--url",
    default=f"http://127.0.0.1:{PORT}",
    metavar="URL",
    help=f"Server to use, if it runs and has MODEL [http://127.0.0.1:{PORT}].",
)
@click.option("--api-key", metavar="KEY", help="Key of the server [HEADRACE_API_KEY].")
@click.argument("arguments", metavar="[-- ARGS]", nargs=-1, type=click.UNPROCESSED)
def launch(agent: str, model: str | None, url: str, api_key: str | None, arguments: Sequence[str]) -> int:
    """Run a coding agent on a local model: codex, claude, opencode, pi or aider, with its own ARGS.

    Starts a server unless one runs. The agent's settings count for this run alone; its own files are not changed. Ends
    with the agent, and with its exit code.
    """

    chosen = AGENTS[agent]
    program = shutil.which(chosen.program)
    if program is None:
        raise HeadraceError(f"{chosen.program} is not installed", f"`{chosen.install}` installs it")
    with ExitStack() as stack:
        endpoint = stack.enter_context(_endpoint(url, model, api_key or environment.api_key()))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-")))
        setup = chosen.setup(endpoint)
        return _run([program, *setup.write(folder), *arguments], setup.variables)


@contextmanager
def _endpoint(url: str, model: str | None, key: str | None) -> Iterator[Endpoint]:
    """Yield the model of a running server, or of a server that runs during the block."""
    from headrace.app.cli.load_for_answers import resolved_model
    from headrace.app.config.settings import chosen_model, load_settings

    name = chosen_model(model, load_settings())
    running = find_endpoint(url, name, key)
    if running is not None:
        yield running
        return
    resolved_model(name, quiet=False)  # fetched here, where progress can be drawn
    say(f"headrace: loading {name or 'the default model'}", err=True)
    arguments = []
    if name is not None:
        arguments = ["-m", name]
    with server_process(arguments, key) as address:
        endpoint = find_endpoint(address, None, key)
        if endpoint is None:
            raise HeadraceError(f"{address} does not answer", "`headrace serve` says why")
        yield endpoint


def _run(command: Sequence[str], variables: Mapping[str, str | None]) -> int:
    """Run an agent on this terminal, and return its exit code. Ctrl-C is the agent's; SIGTERM ends it."""
    given = {name: value for name, value in variables.items() if value is not None}
    inherited = {name: value for name, value in os.environ.items() if name not in variables}
    with _interrupts_ignored():
        process = subprocess.Popen(command, env={**inherited, **given})
        try:
            code = process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(_AGENT_END_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
    # A signal N that ended the agent is the code -N here, and 128 + N in a shell.
    return code if code >= 0 else 128 - code


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Ignore SIGINT in this process. A handler does that: unlike SIG_IGN it is not inherited by a program."""

    def ignore(_number: int, _frame: FrameType | None) -> None:
        pass

    before = signal.signal(signal.SIGINT, ignore)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


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
        code = server.wait(_SERVER_END_S)
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
        server.wait(_SERVER_END_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    if server.stdout is not None:
        server.stdout.close()
