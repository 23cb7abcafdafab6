"""The server process: socket, engines, uvicorn, signals, end.

SIGTERM stops taking requests and waits for the running ones, up to a grace time; Ctrl-C cuts them at once.
`headrace serve` starts the first engine before it imports this module, since both take a while.

Guard: tests/app/server/test_life.py.
"""

import asyncio
import itertools
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from functools import partial
from types import FrameType

import uvicorn
from msgspec.structs import replace
from starlette.applications import Starlette

from headrace.app.config.load_options import ModelSpec
from headrace.app.engine.client import EngineClient
from headrace.app.engine.events import Event, Failed
from headrace.app.server.application import Served, ServerOptions, application
from headrace.app.server.connection import http_options
from headrace.app.server.engine import ServedEngine
from headrace.app.server.errors import ApiError
from headrace.app.server.installed import InstalledModel, installed_models
from headrace.app.server.metrics import Metrics
from headrace.app.server.served_models import ServedModels
from headrace.app.server.telemetry import Telemetry
from headrace.runtime import errors
from headrace.runtime.errors import HeadraceError, UsageError

_BACKLOG = 256  # connections that the system keeps until they are accepted
_AFTER_GRACE_S = 5.0  # for cut answers to leave
_STOPPING = ApiError(503, "the server is stopping", "stopping", retry_after=5)


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens. port: 0 for any free one. Raises UsageError, one line."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(f"host: {host} cannot be used: {error.strerror}") from None
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_BACKLOG)
        listening.setblocking(False)
    except OSError as error:
        listening.close()
        hint = "choose another one with --port" if port else None
        raise UsageError(f"port {port} of {host} cannot be used: {error.strerror}", hint) from None
    return listening


def _served(client: EngineClient, spec: ModelSpec, options: ServerOptions, on_event: Callable[[Event], None]) -> Served:
    """Return the models of a server, with the listeners of their engines. The parameters are those of `serve`."""
    # `models` is defined below. Only listeners use it, which are called later.
    ids = itertools.count(1)
    telemetry: dict[ServedEngine, Telemetry] = {}
    metrics = Metrics(lambda: models.engines)

    def announce(engine: ServedEngine, event: Event) -> None:
        """Pass an event on, but for the failure that ends the server."""
        is_start = engine is models.first and engine.card is None  # `serve` then raises the failure
        if not (is_start and isinstance(event, Failed)):
            on_event(event)

    def make(client: EngineClient, spec: ModelSpec, name: str | None = None) -> ServedEngine:
        """Return an engine with its listeners. name: as requests give it; None: the model's own."""
        engine = ServedEngine(
            client,
            spec,
            max_open=spec.max_running + options.max_waiting,
            ids=ids,
            name=name,
            idle_unload_s=options.idle_unload_s,
        )
        telemetry[engine] = Telemetry(engine)
        engine.listeners += [partial(announce, engine), partial(metrics.take, engine), telemetry[engine].take]
        return engine

    def make_other(model: InstalledModel) -> ServedEngine:
        """Return the engine of another model, with the options of the start, but without its draft and its hosts."""
        context = spec.context
        if context is not None and model.context is not None:
            context = min(context, model.context)
        other = replace(spec, name=model.stored_as, context=context, draft=None, hosts=None)
        engine = make(EngineClient(), other, model.name)
        engine.start()
        return engine

    models = ServedModels(make(client, spec), make_other, lambda: installed_models(options.others), options.aliases)
    return Served(models, options, metrics, telemetry)


def serve(
    client: EngineClient,
    spec: ModelSpec,
    options: ServerOptions,
    listening: socket.socket,
    on_event: Callable[[Event], None],
) -> None:
    """Serve until a signal.

    client: of the model of the start, which loads.
    on_event: takes LoadProgress, Ready and the like of all models.
    Raises HeadraceError if the model cannot be loaded at the start.
    """
    served = _served(client, spec, options, on_event)
    models = served.models

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        models.first.start()
        try:
            yield
        finally:
            await models.close()

    _silence("uvicorn", "asyncio")
    config = uvicorn.Config(
        application(served, lifespan),
        loop="asyncio",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=round(options.grace_s + _AFTER_GRACE_S),
        **http_options(),
    )
    server = _UvicornServer(config, served, options.grace_s)
    with closing(listening):
        server.run(sockets=[listening])
    failure = models.first.failure
    if server.load_failed and failure is not None:
        kind = getattr(errors, failure.error, HeadraceError)  # its exit code is that of a command that loads by itself
        raise kind(failure.message, failure.hint)


class _UvicornServer(uvicorn.Server):
    """uvicorn with an end that cuts answers. load_failed: the model could not be loaded at the start."""

    def __init__(self, config: uvicorn.Config, served: Served, grace_s: float) -> None:
        super().__init__(config)
        self.load_failed = False
        self._served = served
        self._grace_s = grace_s
        served.models.first.on_failure = self._loading_failed

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if sig == signal.SIGINT:
            self._grace_s = 0.0
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        models = self._served.models
        models.stop(_STOPPING)
        for telemetry in self._served.telemetry.values():
            telemetry.stop()
        cut = asyncio.get_running_loop().call_later(self._grace_s, models.cut)
        try:
            await super().shutdown(sockets)
        finally:
            cut.cancel()

    def _loading_failed(self) -> None:
        if self._served.models.first.card is None:
            self.load_failed = self.should_exit = True


def _silence(*names: str) -> None:
    """Keep a library's log, which has tracebacks, off the terminal."""
    for name in names:
        logger = logging.getLogger(name)
        logger.addHandler(logging.NullHandler())
        logger.propagate = False
