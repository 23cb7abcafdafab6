"""`headrace serve`: a local server for clients of OpenAI's and Anthropic's APIs.

Guard: tests/app/server/test_life.py.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import click
from msgspec import Struct
from msgspec.structs import replace

from headrace.app.answer import MAX_RUNNING
from headrace.app.cli.awake import keep_awake
from headrace.app.cli.decorators import as_object
from headrace.app.cli.model_options import LoadArguments, model_option, model_options
from headrace.app.cli.say import say
from headrace.runtime.errors import ModelNotFoundError, UsageError

if TYPE_CHECKING:
    from headrace.app.answer.first_pass import FirstPassLog
    from headrace.app.engine.events import Event
    from headrace.app.output.progress import StageProgress
    from headrace.app.server.guard import Rules

PORT = 8080
MAX_WAITING = 64  # requests
GRACE_S = 30.0  # for running answers at SIGTERM
_PARENT_S = 0.5  # between two checks of the parent


class ServeArguments(Struct, frozen=True):
    """Arguments of `headrace serve`.

    model: the one of the start; None: the first of `models`, or the default.
    models: installed models that requests may name; None: all.
    origins: web pages that may call.
    aliases: other names of the model of the start.
    parallel: requests answered at a time.
    queue: requests that may wait.
    grace: seconds for running answers at SIGTERM.
    idle_unload: seconds without a request until a model is unloaded; None: never.
    load: options of loading, for all models.
    parent: process to end with; None: none.
    """

    model: str | None
    models: tuple[str, ...] | None
    host: str
    port: int
    api_key: str | None
    origins: tuple[str, ...]
    aliases: tuple[str, ...]
    parallel: int
    queue: int
    grace: float
    idle_unload: float | None
    load: LoadArguments
    quiet: bool
    parent: int | None

    @property
    def first_model(self) -> str | None:
        """The model to load at the start; None for the default."""
        if self.model is None and self.models:
            return self.models[0]
        return self.model

    def rules(self) -> "Rules":
        """Return the rules of access. Raises UsageError for an address without a key that others reach."""
        from headrace.app.server.guard import Rules, is_loopback
        from headrace.runtime.config import environment

        key = self.api_key or environment.api_key()
        if key is None and not is_loopback(self.host):
            hint = "set HEADRACE_API_KEY or --api-key, or use 127.0.0.1"
            raise UsageError(f"host {self.host} can be reached by other machines", hint)
        return Rules(self.host, key, frozenset(self.origins))


@click.command()
@model_option
@click.option(
    "--models",
    metavar="NAME,...",
    callback=lambda _ctx, _param, value: _split_names(value),
    help="Installed models that requests may name [all].",
)
@click.option("--host", default="127.0.0.1", metavar="ADDRESS", help="Address to listen on [127.0.0.1].")
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, help=f"Port; 0 is any free one [{PORT}].")
@click.option("--api-key", metavar="KEY", help="Key that requests must have [HEADRACE_API_KEY].")
@click.option("--allow-origin", "origins", multiple=True, metavar="URL", help="Web page that may call. Repeatable.")
@click.option("--alias", "aliases", multiple=True, metavar="NAME", help="Other name of the model; *: any. Repeatable.")
@click.option(
    "--parallel", type=click.IntRange(1, 256), default=MAX_RUNNING, help=f"Requests at a time [{MAX_RUNNING}]."
)
@click.option(
    "--queue", type=click.IntRange(0, 10_000), default=MAX_WAITING, help=f"Waiting requests, at most [{MAX_WAITING}]."
)
@click.option(
    "--grace",
    type=click.FloatRange(0, 3600),
    default=GRACE_S,
    metavar="S",
    help=f"Seconds for answers at SIGTERM [{GRACE_S:g}].",
)
@click.option(
    "--idle-unload", type=click.FloatRange(1), metavar="S", help="Seconds without a request until memory is freed."
)
@model_options
@click.option("-q", "--quiet", is_flag=True, help="No progress and no line per request.")
@click.option("--parent", type=int, hidden=True, help="Process id of the parent; the server ends when it has ended.")
@as_object(ServeArguments)
def serve(arguments: ServeArguments) -> int:
    """Serve models to clients of OpenAI's and Anthropic's APIs, on this machine.

    MODEL is loaded at the start, another installed one when a request names it. Answer options that a request lacks are
    as for `run`. Ctrl-C stops the server, SIGTERM after the running answers.
    """
    keep_awake()
    from headrace.app.cli.load_for_answers import install_file
    from headrace.app.config.settings import chosen_model, load_settings
    from headrace.app.engine.client import EngineClient

    rules = arguments.rules()
    if arguments.parent is not None:
        _end_with(arguments.parent)
    settings = load_settings()
    draft = arguments.load.chosen_draft(settings, None)
    model = arguments.first_model or chosen_model(None, settings)
    if arguments.models:
        _check_installed(name for name in arguments.models if name != model)
    for name in (model, draft):
        install_file(name, quiet=arguments.quiet)
    spec = replace(arguments.load.spec(settings, draft), name=model, serving=True, max_running=arguments.parallel)
    client = EngineClient()
    try:
        client.start(spec)  # before the imports below, which take a while
        from headrace.app.answer.first_pass import FirstPassLog
        from headrace.app.output.progress import drawn_progress
        from headrace.app.server.application import ServerOptions
        from headrace.app.server.serve import listening_socket
        from headrace.app.server.serve import serve as serve_model

        listening = listening_socket(arguments.host, arguments.port)
        url = _url(arguments.host, listening.getsockname()[1])
        log: Callable[[str], None] = _log
        if arguments.quiet:
            log = _log_nothing
        served = arguments.models
        if spec.hosts is not None:  # ranks load one model
            served = ()
        options = ServerOptions(
            rules,
            settings.sampling,
            frozenset(arguments.aliases),
            served,
            arguments.queue,
            grace_s=arguments.grace,
            idle_unload_s=arguments.idle_unload,
            log=log,
        )
        first_pass = FirstPassLog(lambda text: log(f"headrace: {text}"))
        with drawn_progress(quiet=arguments.quiet) as progress:
            serve_model(client, spec, options, listening, partial(_announce, url, progress, first_pass))
    finally:
        client.close()
    return 0


def _announce(url: str, progress: "StageProgress", first_pass: "FirstPassLog", event: "Event") -> None:
    """Show an event of the engine: draw the progress of loading, or name the model's address, or the failure."""
    from headrace.app.engine.events import Damaged, Died, Failed, LoadProgress, Ready, SlowFirstPass, one_line

    if isinstance(event, LoadProgress):
        progress(event.stage, event.done, event.total)
    elif isinstance(event, Ready):
        progress.clear()
        first_pass.begin()
        # `announced_address` in launch/server.py reads the address after the last " at " of this line, which
        # has to be the first one on standard output.
        say(f"headrace: {event.card.name} at {url}")
        sys.stdout.flush()
    elif isinstance(event, SlowFirstPass):
        first_pass.add(event.seconds)
    elif isinstance(event, Damaged | Died) or (isinstance(event, Failed) and event.id is None):
        progress.clear()
        hint: str | None = "it is started again"
        if not isinstance(event, Died):
            hint = event.hint
        say(f"headrace: {one_line(event.message, hint)}", err=True)


def _split_names(value: str | None) -> tuple[str, ...] | None:
    """Return the names of a list with commas; None without a list."""
    if value is None:
        return None
    names = [part.strip() for part in value.split(",")]
    return tuple(name for name in names if name)


def _end_with(parent: int) -> None:
    """End this process by SIGTERM soon after its parent has ended, also if that was killed."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_S)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _check_installed(names: Iterable[str]) -> None:
    """Raise ModelNotFoundError for a name that no installed model has, nor one of another program."""
    from headrace.app.server.installed import installed_models

    for name in names:
        if not installed_models([name]):
            raise ModelNotFoundError(f"{name} is not installed", f"`headrace models pull {name}` fetches it")


def _url(host: str, port: int) -> str:
    if ":" in host:
        host = f"[{host}]"
    return f"http://{host}:{port}/v1"


def _log(line: str) -> None:
    say(line, err=True)


def _log_nothing(_: str) -> None:
    pass
