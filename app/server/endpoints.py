"""The endpoints: requests to calls, answers to responses."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from headrace.app.answer.options import AnswerOptions
from headrace.app.engine.commands import CountTokens
from headrace.app.engine.events import TokensCounted
from headrace.app.engine.model_card import ModelCard
from headrace.app.server import anthropic, openai_chat, openai_completions, responses
from headrace.app.server.body import read_body
from headrace.app.server.call import Call
from headrace.app.server.engine import ServedEngine
from headrace.app.server.fields import Body
from headrace.app.server.form import Form
from headrace.app.server.guard import Rules
from headrace.app.server.metrics import Metrics
from headrace.app.server.models import installed_object, model_list, model_object
from headrace.app.server.respond import DocumentResponse, StreamResponse, answer, while_connected
from headrace.app.server.served_models import ServedModels
from headrace.app.server.telemetry import Telemetry

Log = Callable[[str], None]
Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Served:
    """Needs of the endpoints. telemetry: of each engine. defaults: options of all requests."""

    models: ServedModels
    rules: Rules
    metrics: Metrics
    telemetry: Mapping[ServedEngine, Telemetry]
    defaults: AnswerOptions = field(default_factory=AnswerOptions)
    keep_alive_s: float = 10.0
    log: Log = lambda _: None


def routes(served: Served) -> list[Route]:
    """Return all endpoints."""
    return [
        Route("/v1/chat/completions", _answers(served, openai_chat.read_call, openai_chat.ChatForm), methods=["POST"]),
        Route(
            "/v1/completions",
            _answers(served, openai_completions.read_call, openai_completions.CompletionForm),
            methods=["POST"],
        ),
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
    """Return the endpoint that answers calls in one form."""

    async def endpoint(request: Request) -> Response:
        call = read(await read_body(request))

        def form_of(card: ModelCard) -> Form:
            return form(call, card.name)

        work = answer(call, served.models, form_of, served.defaults, served.keep_alive_s)
        return await while_connected(request.receive, work)

    return endpoint


def _count_tokens(served: Served) -> Endpoint:
    async def count(call: Call) -> Response:
        engine, card = await served.models.ready(call.model)
        thinking = call.thinking(card, served.defaults)
        answering = engine.submit(
            lambda ids: [CountTokens(ids[0], call.messages, thinking, call.tools, call.options.chat_template_kwargs)]
        )
        try:
            arrived = await answering.next()
        finally:
            answering.leave()
        assert arrived is not None
        assert isinstance(arrived[1], TokensCounted)
        return DocumentResponse({"input_tokens": arrived[1].tokens})

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
        found = await while_connected(request.receive, _model_objects(served.models))
        return DocumentResponse(next(model for model in found if model["id"] == engine.name))

    return endpoint


async def _model_objects(models: ServedModels) -> list[dict[str, Any]]:
    """Return the documents of all models. Loads none but that of the start."""
    first = models.first
    documents = [model_object(first.card or await first.loaded(), first.state)]
    for model, engine in await models.listed():
        if engine is not None and engine.card is not None:
            documents.append(model_object(engine.card, engine.state))
        else:
            documents.append(installed_object(model, engine.state if engine is not None else "unloaded"))
    return documents


def _telemetry(served: Served) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        name = request.query_params.get("model")
        engine = await while_connected(request.receive, served.models.find(name)) if name else served.models.first
        return StreamResponse(served.telemetry[engine].stream(engine.card, served.keep_alive_s))

    return endpoint


def _health(served: Served) -> Endpoint:
    async def endpoint(_: Request) -> Response:
        state = served.models.first.state
        well = state in ("ready", "unloaded")
        engines = served.models.engines
        document = {
            "status": "ok" if well else state,
            "engine": state,
            "requests": sum(engine.open for engine in engines),
            "models_loaded": sum(engine.state == "ready" for engine in engines),
        }
        return DocumentResponse(document, 200 if well else 503)

    return endpoint


def _metrics(served: Served) -> Endpoint:
    async def endpoint(_: Request) -> Response:
        return Response(served.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return endpoint


async def _root(_: Request) -> Response:
    return PlainTextResponse("headrace\n")
