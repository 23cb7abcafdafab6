"""Errors of HTTP requests: status, message, and the shapes that OpenAI's and Anthropic's clients parse.

Unexpected errors become one general line, without a traceback. A HeadraceError keeps its message, so callers keep paths
of files out of it: `ServedEngine._not_loaded` of a load, `ServedModels._read_installed` of the store. `application.py`
catches every exception and makes an `ApiError` of it. Codes are public: clients compare them.

Guards: tests/app/server/test_guard.py and test_openai.py. For paths: test_abuse.py for invalid requests,
test_served_models.py for the store, test_several_models.py for a model that cannot be loaded.
"""

import traceback

from headrace.app.engine.events import Abandoned, ContextFull, Event, Failed, one_line
from headrace.runtime.config import environment
from headrace.runtime.errors import HeadraceError, UsageError

# Error types by status. Others are invalid_request_error below 500, else server_error (OpenAI's) or api_error.
_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
# Names of classes of `runtime.errors`, as `Failed.error` has them.
_OF_REQUEST = ("UsageError", "CheckpointError", "ContextLimitError")  # a template's refusal is a CheckpointError
_MEMORY = ("NotEnoughMemoryError", "PoolFullError")
INTERNAL = "internal error of the server"


class ApiError(Exception):
    """A refused or failed request.

    status: of the HTTP response.
    message: for people.
    code: a short name for programs.
    param: the field it is about.
    retry_after: seconds after which a retry makes sense.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after = retry_after

    @property
    def headers(self) -> dict[str, str]:
        """The headers of its response."""
        if self.retry_after is None:
            return {}
        return {"Retry-After": str(self.retry_after)}

    def openai(self) -> dict[str, object]:
        """Return the error document of OpenAI's API."""
        kind = "server_error"
        if self.status < 500:
            kind = "invalid_request_error"
        kind = _OPENAI_TYPES.get(self.status, kind)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic(self) -> dict[str, object]:
        """Return the error document of Anthropic's API."""
        kind = "api_error"
        if self.status < 500:
            kind = "invalid_request_error"
        kind = _ANTHROPIC_TYPES.get(self.status, kind)
        return {"type": "error", "error": {"type": kind, "message": self.message}}


def refused(message: str, param: str | None = None) -> ApiError:
    """Return the error of a field that cannot be honoured."""
    return ApiError(400, message, "invalid_request", param)


def api_error(error: Exception) -> ApiError:
    """Return the error of a request for any exception. HEADRACE_DEBUG shows unexpected ones on standard error."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UsageError):  # a message about a field begins with its name
        return refused(one_line(str(error), error.hint), str(error).partition(" ")[0].rstrip(":"))
    if isinstance(error, HeadraceError):
        return ApiError(503, one_line(str(error), error.hint), "unavailable", retry_after=5)
    if environment.debug():
        traceback.print_exception(error)
    return ApiError(500, INTERNAL, "internal_error")


def event_error(event: Event) -> ApiError | None:
    """Return the error that an event means for its request; None for any other event."""
    match event:
        case ContextFull():
            message = f"the prompt has {event.prompt_tokens} tokens, the context limit is {event.limit}"
            return ApiError(400, message, "context_length_exceeded", "messages")
        case Abandoned():
            return ApiError(503, "the request was cancelled", "cancelled", retry_after=1)
        case Failed(error=kind) if kind in _OF_REQUEST:
            code = "invalid_request"
            if kind == "ContextLimitError":
                code = "context_length_exceeded"
            return ApiError(400, one_line(event.message, event.hint), code)
        case Failed(error=kind) if kind in _MEMORY:
            return ApiError(503, "not enough memory for this request", "not_enough_memory", retry_after=5)
        case Failed():
            return ApiError(500, INTERNAL, "internal_error")
    return None
