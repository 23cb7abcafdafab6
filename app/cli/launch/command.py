"""`headrace launch`: a coding agent on a model of this machine, with settings for this run alone.

The agent talks to a server that runs already, or to one that ends with it (`server.py`). A new agent is a row in
`agents.py`.

Guard: tests/app/cli/test_launch.py.
"""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

import click

from headrace.app.cli.launch.agents import AGENTS, Endpoint
from headrace.app.cli.launch.server import find_endpoint, server_process
from headrace.app.cli.model_options import model_option
from headrace.app.cli.say import say
from headrace.app.cli.serve import PORT
from headrace.runtime.config import environment
from headrace.runtime.errors import HeadraceError

_AGENT_END_S = 5.0  # for an agent to end after SIGTERM


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
