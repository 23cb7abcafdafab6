"""The endpoints: requests to calls, answers to responses."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

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
from headrace.app.server.errors import ApiError
from headrace.app.server.fields import Body
from headrace.app.server.form import Form
from headrace.app.server.guard import Rules
from headrace.app.server.metrics import Metrics
from headrace.app.server.models import is_served, model_list, model_object
from headrace.app.server.respond import DocumentResponse, StreamResponse, answer, while_connected
from headrace.app.server.telemetry import Telemetry

Log = Callable[[str], None]
Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Served:
    """Needs of the endpoints. aliases: other names of the model; `*`: any name. defaults: options of all requests."""

    engine: ServedEngine
    rules: Rules
    metrics: Metrics
    telemetry: Telemetry
    defaults: AnswerOptions = field(default_factory=AnswerOptions)
    aliases: frozenset[str] = frozenset()
    keep_alive_s: float = 10.0
    log: Log = lambda _: None

    def check_model(self, name: str | None, card: ModelCard) -> None:
        """Raises ApiError for a model that is not served."""
        if not is_served(name, card, self.aliases):
            message = f"the model {name!r:.100} is not served here, only {card.name!r}"
            raise ApiError(404, message, "model_not_found", "model")


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


def _answers(served: Served, read: Callable[[Body], Call], form: Callable[..., Form]) -> Endpoint:
    """Return the endpoint that answers calls in one form."""

    async def endpoint(request: Request) -> Response:
        call = read(await read_body(request))

        def form_of(card: ModelCard) -> Form:
            served.check_model(call.model, card)
            return form(call, card.name, thinks=card.thinks)

        work = answer(call, served.engine, form_of, served.defaults, served.keep_alive_s)
        return await while_connected(request.receive, work)

    return endpoint


def _count_tokens(served: Served) -> Endpoint:
    async def count(call: Call) -> Response:
        card = await served.engine.ready()
        served.check_model(call.model, card)
        thinking = call.thinking(card, served.defaults)
        answering = served.engine.submit(
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
        return DocumentResponse(model_list(await while_connected(request.receive, served.engine.ready())))

    return endpoint


def _model(served: Served) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        card = await while_connected(request.receive, served.engine.ready())
        served.check_model(str(request.path_params["name"]), card)
        return DocumentResponse(model_object(card))

    return endpoint


def _telemetry(served: Served) -> Endpoint:
    async def endpoint(_: Request) -> Response:
        return StreamResponse(served.telemetry.stream(served.engine.card, served.keep_alive_s))

    return endpoint


def _health(served: Served) -> Endpoint:
    async def endpoint(_: Request) -> Response:
        engine = served.engine
        well = engine.state in ("ready", "unloaded")
        document = {"status": "ok" if well else engine.state, "engine": engine.state, "requests": engine.open}
        return DocumentResponse(document, 200 if well else 503)

    return endpoint


def _metrics(served: Served) -> Endpoint:
    async def endpoint(_: Request) -> Response:
        return Response(served.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return endpoint


async def _root(_: Request) -> Response:
    return PlainTextResponse("headrace\n")
