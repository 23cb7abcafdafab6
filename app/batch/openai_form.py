"""The OpenAI batch form: requests for chat completions and completions, and results as that API writes them.

    {"custom_id": "q1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...], "max_tokens": 64}}

What a body may say beyond the API's own names: top_k, min_p, repetition_penalty, speculate and thinking. What would
change the answer and is not done here (tools, several choices, a response format) is refused by name. Source of the
shapes: the API reference of OpenAI, sections Batch, Chat and Completions.
"""

from collections.abc import Mapping
from typing import Any

from headrace.app.batch.line import Defaults, Form
from headrace.app.batch.messages import conversation
from headrace.app.batch.options import OPTIONS, read_options, refuse_unknown, shown, text
from headrace.runtime.errors import UsageError

_LINE = frozenset({"custom_id", "method", "url", "body"})
_URLS: Mapping[str, Form] = {"/v1/chat/completions": "chat.completion", "/v1/completions": "text_completion"}
# What asks for what is done anyway; any other value is refused.
_AS_IT_IS: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stream": (False,),
    "logprobs": (False,),
    "echo": (False,),
    "response_format": ({"type": "text"},),
}
_LABELS = frozenset({"user", "metadata"})  # for the service's own books
_BODY = OPTIONS | _AS_IT_IS.keys() | _LABELS | {"model", "max_completion_tokens"}
_ASKS: Mapping[Form, str] = {"chat.completion": "messages", "text_completion": "prompt"}


def form_of(told: Mapping[str, Any]) -> Form:
    """Which of the API's calls a line is: by its url, without one by what its body asks. Raises UsageError."""
    url = told.get("url")
    if url is None:
        body = told.get("body")
        return "text_completion" if isinstance(body, dict) and "prompt" in body else "chat.completion"
    if not isinstance(url, str) or url not in _URLS:
        raise UsageError(f"url must be one of {', '.join(_URLS)}, not {shown(url)}")
    return _URLS[url]


def read_body(
    told: Mapping[str, Any], form: Form, defaults: Defaults
) -> tuple[list[dict[str, str]] | None, str, dict[str, Any]]:
    """(messages or None, the text to continue, options) of a line in this form. Raises UsageError."""
    refuse_unknown(told, _LINE)
    if told.get("method", "POST") != "POST":
        raise UsageError(f"method must be POST, not {shown(told['method'])}")
    body = told.get("body")
    if not isinstance(body, dict):
        raise UsageError(f"body must be an object, not {shown(body)}")
    asks = _ASKS[form]
    refuse_unknown(body, _BODY | {asks}, " in body")
    body = {key: value for key, value in body.items() if value is not None}
    for key, allowed in _AS_IT_IS.items():
        if key in body and not any(body[key] == value and type(body[key]) is type(value) for value in allowed):
            raise UsageError(f"{key} can only be {allowed[0]!r}, not {shown(body[key])}")
    if "model" in body and defaults.names is not None and text("model", body["model"]) not in defaults.names:
        raise UsageError(
            f"the line asks for model {shown(body['model'])}, but {defaults.model} answers",
            "-m MODEL has that model answer every line, whatever model they name",
        )
    if "max_completion_tokens" in body:
        if "max_tokens" in body:
            raise UsageError("max_tokens and max_completion_tokens are the same: give one of them")
        body["max_tokens"] = body["max_completion_tokens"]
    if asks not in body:
        raise UsageError(f"a body for this url needs {asks}")
    options = read_options(body)
    if form == "text_completion":
        if "thinking" in options:
            raise UsageError("thinking has no place where a text is continued as it is")
        return None, text("prompt", body["prompt"]), options
    return conversation(body["messages"], defaults.system), "", options


def response(
    digest: str, name: str | int | None, status: int, body: dict[str, Any], error: dict[str, Any] | None
) -> dict[str, Any]:
    """A line of the output in this form."""
    return {
        "id": f"{PREFIX}{digest}",
        "custom_id": name,
        "response": {"status_code": status, "request_id": f"req_{digest}", "body": body},
        "error": error,
    }


PREFIX = "batch_req_"
"""Of a result's id; the rest is the request's digest."""
