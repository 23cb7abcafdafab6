"""`headrace launch`: a coding agent on a model of this machine, with settings for this run alone."""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from headrace.app.cli.completion import model_names
from headrace.app.cli.launch.agents import AGENTS
from headrace.app.cli.serve import PORT
from headrace.runtime.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.app.cli.launch.agents import Endpoint

_END_S = 5.0  # for an agent to end after SIGTERM


@click.command(context_settings={"ignore_unknown_options": False})
@click.argument("agent", metavar="AGENT", type=click.Choice(list(AGENTS)))
@click.option(
    "-m", "--model", metavar="MODEL", shell_complete=model_names, help="Catalog name, directory, .gguf file or hub id."
)
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
    from headrace.runtime.config import environment

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
def _endpoint(url: str, model: str | None, key: str | None) -> "Iterator[Endpoint]":
    """Yield the model of a running server, or of a server that runs during the block."""
    from headrace.app.cli.launch.server import find_endpoint, own_server
    from headrace.app.cli.load_for_answers import resolved_model
    from headrace.app.config.settings import chosen_model, load_settings

    name = chosen_model(model, load_settings())
    found = find_endpoint(url, name, key)
    if found is not None:
        yield found
        return
    resolved_model(name, quiet=False)  # fetched here, where progress can be drawn
    with own_server(name, key) as endpoint:
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
                    process.wait(_END_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
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
