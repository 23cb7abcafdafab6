"""The Starlette application: endpoints, checks, errors in the form of their endpoint, one log line a request.

A request passes `_Outer` (access rules, counting, log), Starlette's routing, and its endpoint. Endpoints with answers
read a body into a `Call` and leave the rest to `respond.answer`. A new endpoint is a route in `routes`.

Guards: tests/app/server/test_abuse.py and test_openai.py.
"""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from urllib.parse import quote

from msgspec import Struct, field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.app.answer.call import Call
from headrace.app.answer.fields import Body
from headrace.app.answer.openai_form import read_chat, read_completion
from headrace.app.answer.options import AnswerOptions
from headrace.app.engine.commands import CountTokens
from headrace.app.engine.events import TokensCounted
from headrace.app.engine.model_card import ModelCard
from headrace.app.server import anthropic, openai, responses
from headrace.app.server.body import read_body
from headrace.app.server.engine import ServedEngine
from headrace.app.server.errors import ApiError, api_error
from headrace.app.server.form import Form
from headrace.app.server.guard import Rules
from headrace.app.server.metrics import Metrics
from headrace.app.server.models import installed_object, model_list, model_object
from headrace.app.server.respond import (
    DisconnectedError,
    DocumentResponse,
    StreamResponse,
    answer,
    thinking_of,
    while_connected,
)
from headrace.app.server.served_models import ServedModels
from headrace.app.server.telemetry import Telemetry
from headrace.runtime.errors import HeadraceError

_PLAIN = "/:@!$&'()*+,;=~"  # in the log as they are; a line break, say, is written as %0A
# Codes and messages of Starlette's own errors, by status. Its words are "Not Found", which reads as if a model was not.
_ROUTING_ERRORS = {
    404: (
        "not_found",
        "this server has no such endpoint; it has OpenAI's chat completions, completions, responses and models, and "
        "Anthropic's messages, but not Ollama's API",
    ),
    405: ("method_not_allowed", "this endpoint takes other methods; the Allow header has them"),
}
_CLIENT_CLOSED_REQUEST = 499  # in the log: the client closed the connection
Log = Callable[[str], None]
Endpoint = Callable[[Request], Awaitable[Response]]


class ServerOptions(Struct, frozen=True):
    """Options of `headrace serve`.

    defaults: options of all requests.
    aliases: other names of the model of the start; `*`: any name.
    others: installed models that requests may name; None: all.
    max_waiting: requests of a model beyond the running ones.
    keep_alive_s: seconds of a stream without an event after which it sends a keep-alive.
    grace_s: seconds for running answers at SIGTERM.
    idle_unload_s: seconds without a request after which a model is unloaded; None: never.
    log: takes a line per request.
    """

    rules: Rules
    defaults: AnswerOptions = field(default_factory=AnswerOptions)
    aliases: frozenset[str] = frozenset()
    others: Sequence[str] | None = None
    max_waiting: int = 64
    keep_alive_s: float = 10.0
    grace_s: float = 30.0
    idle_unload_s: float | None = None
    log: Log = lambda _: None


class Served(Struct, frozen=True):
    """Parts of the server that endpoints use. telemetry: of each engine."""

    models: ServedModels
    options: ServerOptions
    metrics: Metrics
    telemetry: Mapping[ServedEngine, Telemetry]


def routes(served: Served) -> list[Route]:
    """Return all endpoints."""
    return [
        Route("/v1/chat/completions", _answers(served, read_chat, openai.ChatForm), methods=["POST"]),
        Route("/v1/completions", _answers(served, read_completion, openai.CompletionForm), methods=["POST"]),
        Route("/v1/responses", _answers(served, responses.read_call, responses.ResponseForm), methods=["POST"]),
        Route("/v1/messages", _answers(served, anthropic.read_call, anthropic.MessageForm), methods=["POST"]),
        Route("/v1/messages/count_tokens", _count_tokens(served), methods=["POST"]),
        Route("/v1/models", _models(served)),
        Route("/v1/models/{name:path}", _model(served)),
        Route("/v1/telemetry", _telemetry(served)),
        Route("/health", _health(served)),
        Route("/metrics", _metrics(served)),
        Route("/", _root),
    ]


def _answers(served: Served, read: Callable[[Body], Call], form: Callable[[Call, str], Form]) -> Endpoint:
    """Return the endpoint that answers calls in one form.

    read: returns the call of a body.
    form: makes the form of a call's answers, from the call and the name of the model.
    """

    async def endpoint(request: Request) -> Response:
        call = read(await read_body(request))

        def form_of(card: ModelCard) -> Form:
            return form(call, card.name)

        work = answer(call, served.models, form_of, served.options.defaults, served.options.keep_alive_s)
        return await while_connected(request.receive, work)

    return endpoint


def _count_tokens(served: Served) -> Endpoint:
    """Return the endpoint that counts the tokens of a prompt."""

    async def count(call: Call) -> Response:
        engine, card = await served.models.ready(call.model)
        thinking = thinking_of(call, card, served.options.defaults)
        [number] = engine.new_ids()
        command = CountTokens(number, call.messages, thinking, call.tools, call.options.chat_template_kwargs)
        answering = engine.submit([command])
        try:
            arrived = await answering.next()
        finally:
            answering.leave()
        assert arrived is not None
        _choice, counted = arrived
        assert isinstance(counted, TokensCounted)
        return DocumentResponse({"input_tokens": counted.tokens})

    async def endpoint(request: Request) -> Response:
        return await while_connected(request.receive, count(anthropic.read_call(await read_body(request))))

    return endpoint


def _models(served: Served) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        return DocumentResponse(model_list(await while_connected(request.receive, _model_objects(served.models))))

    return endpoint


def _model(served: Served) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        engine = await while_connected(request.receive, served.models.find(str(request.path_params["name"])))
        documents = await while_connected(request.receive, _model_objects(served.models))
        return DocumentResponse(next(model for model in documents if model["id"] == engine.name))

    return endpoint


async def _model_objects(models: ServedModels) -> list[dict[str, object]]:
    """Return the documents of all models. Loads none but that of the start."""
    first = models.first
    documents = [model_object(first.card or await first.loaded(), first.state)]
    for model, engine in await models.listed():
        if engine is None:
            documents.append(installed_object(model, "unloaded"))
        elif engine.card is None:
            documents.append(installed_object(model, engine.state))
        else:
            documents.append(model_object(engine.card, engine.state))
    return documents


def _telemetry(served: Served) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        name = request.query_params.get("model")
        engine = served.models.first
        if name:
            engine = await while_connected(request.receive, served.models.find(name))
        return StreamResponse(served.telemetry[engine].stream(engine.card, served.options.keep_alive_s))

    return endpoint


def _health(served: Served) -> Endpoint:
    """Return the endpoint for load balancers: 200 if the model of the start answers, or would be loaded again."""

    async def endpoint(_: Request) -> Response:
        state = served.models.first.state
        status: str = state
        code = 503
        if state in ("ready", "unloaded"):
            status = "ok"
            code = 200
        engines = served.models.engines
        document = {
            "status": status,
            "engine": state,
            "requests": sum(engine.open for engine in engines),
            "models_loaded": sum(engine.state == "ready" for engine in engines),
        }
        return DocumentResponse(document, code)

    return endpoint


def _metrics(served: Served) -> Endpoint:
    async def endpoint(_: Request) -> Response:
        return Response(served.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return endpoint


async def _root(_: Request) -> Response:
    return PlainTextResponse("headrace\n")


def application(served: Served, lifespan: Callable[[Starlette], AbstractAsyncContextManager[None]]) -> ASGIApp:
    """Return the application. lifespan: starts and closes the engine."""
    origins = sorted(served.options.rules.origins)
    middleware = []
    if origins:
        middleware.append(Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]))
    app = Starlette(
        routes=routes(served),
        middleware=middleware,
        exception_handlers=dict.fromkeys(
            (HTTPException, ApiError, HeadraceError, DisconnectedError, Exception), _failed
        ),
        lifespan=lifespan,
    )
    return _Outer(app, served)


async def _failed(request: Request, error: Exception) -> Response:
    """Return the response of any exception, in the form of the endpoint's family."""
    if isinstance(error, DisconnectedError):
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    if isinstance(error, HTTPException):
        code, message = _ROUTING_ERRORS.get(error.status_code, ("invalid_request", str(error.detail)))
        return _response(request.url.path, ApiError(error.status_code, message, code), error.headers)
    return _response(request.url.path, api_error(error))


def _response(path: str, error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    if path.startswith("/v1/messages"):
        document = error.anthropic()
    else:
        document = error.openai()
    return DocumentResponse(document, error.status, headers={**error.headers, **(headers or {})})


class _Outer:
    """Checks a request, turns any exception into an error response, counts and logs: no path of files, no text."""

    def __init__(self, app: ASGIApp, served: Served) -> None:
        self._app = app
        self._served = served
        self._paths = {route.path for route in routes(served)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        status = 0
        path = scope["path"]
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}

        async def noted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            self._served.options.rules.check(scope["method"], path, headers)
            await self._app(scope, receive, noted)
        except Exception as error:  # known or not, it gets the form of the endpoint's errors
            if status == 0:
                allowed = self._served.options.rules.cors(headers)  # so that an allowed page can read why
                await _response(path, api_error(error), allowed)(scope, receive, noted)
        finally:
            counted_path = path if path in self._paths else "other"
            self._served.metrics.requests.labels(counted_path, status).inc()
            request_line = f"{scope['method']} {quote(path, safe=_PLAIN)}"
            self._served.options.log(f"{request_line:.100} {status} {time.monotonic() - started:.3f} s")
