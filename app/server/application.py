"""The Starlette application: checks, errors in the form of their endpoint, one log line a request."""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.app.server.endpoints import Served, routes
from headrace.app.server.errors import ApiError, api_error
from headrace.app.server.respond import DocumentResponse, LeftError
from headrace.runtime.errors import HeadraceError

_PLAIN = "/:@!$&'()*+,;=~"  # in the log as they are; a line break, say, is written as %0A
_LEFT = 499  # in the log: the client closed the connection


def application(served: Served, lifespan: Callable[[Starlette], AbstractAsyncContextManager[None]]) -> ASGIApp:
    """Return the application. lifespan: starts and closes the engine."""
    origins = sorted(served.rules.origins)
    cors = Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    app = Starlette(
        routes=routes(served),
        middleware=[cors] if origins else [],
        exception_handlers=dict.fromkeys((HTTPException, ApiError, HeadraceError, LeftError, Exception), _failed),
        lifespan=lifespan,
    )
    return _Outer(app, served)


async def _failed(request: Request, error: Exception) -> Response:
    """Return the response of any exception, in the form of the endpoint's family."""
    if isinstance(error, LeftError):
        return Response(status_code=_LEFT)
    if isinstance(error, HTTPException):
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "invalid_request")
        api = ApiError(error.status_code, str(error.detail), code)
        return _response(request.url.path, api, error.headers)
    return _response(request.url.path, api_error(error))


def _response(path: str, error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    document = error.anthropic() if path.startswith("/v1/messages") else error.openai()
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
            self._served.rules.check(scope["method"], path, headers)
            await self._app(scope, receive, noted)
        except Exception as error:
            if status == 0:
                allowed = self._served.rules.cors(headers)  # so that an allowed page can read why
                await _response(path, api_error(error), allowed)(scope, receive, noted)
        finally:
            self._served.metrics.requests.labels(path if path in self._paths else "other", status).inc()
            asked = f"{scope['method']} {quote(path, safe=_PLAIN)}"
            self._served.log(f"{asked:.100} {status} {time.monotonic() - started:.3f} s")
