"""The OpenAI batch form: requests for chat completions and completions, and results as that API writes them.

    {"custom_id": "q1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...], "max_tokens": 64}}

A body is read as the server reads it (`app.answer.openai_form`). Unknown fields are refused, and so is more than one
answer: an error before hours of work. `parse.py` calls `form_of` and `read_body`, `result.py` calls `response`.
Source of the shapes: the API reference of OpenAI, section Batch.

Guards: tests/app/batch/test_output.py and test_parse.py.
"""

from collections.abc import Mapping

from msgspec.structs import replace

from headrace.app.answer.call import Call
from headrace.app.answer.fields import object_named
from headrace.app.answer.openai_form import CHAT_FIELDS, COMPLETION_FIELDS, read_chat, read_completion
from headrace.app.batch.line import BatchDefaults, Form, refuse_unknown, with_system
from headrace.runtime.config.value_types import OneOf, read_value, shown
from headrace.runtime.errors import UsageError

PREFIX = "batch_req_"
"""Beginning of a result's id; the rest is the request's digest."""
_LINE = frozenset({"custom_id", "method", "url", "body"})
_URLS: Mapping[str, Form] = {"/v1/chat/completions": "chat.completion", "/v1/completions": "text_completion"}
_FIELDS: Mapping[Form, frozenset[str]] = {"chat.completion": CHAT_FIELDS, "text_completion": COMPLETION_FIELDS}
# Fields of the server alone.
_NOT_HERE = frozenset(
    {
        "continue_final_message",  # every answer of a batch begins anew
        "suffix",  # the text after an answer: a batch fills no gaps
        "headrace",  # figures of the answer in the server's form
    }
)
# The field that each form must have.
_CONTENT: Mapping[Form, str] = {"chat.completion": "messages", "text_completion": "prompt"}
# Fields that may only have the value of the default behaviour.
_FIXED: Mapping[str, object] = {"n": 1, "best_of": 1, "stream": False, "echo": False}
# Fields that change no answer: labels, caches and billing of OpenAI's service, and hints.
_IGNORED = frozenset({
    "user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
    "verbosity", "prediction",
})  # fmt: skip


def form_of(given: Mapping[str, object]) -> Form:
    """Return the API call of a line, by its url, else by its body. Raises UsageError."""
    url = given.get("url")
    if url is None:
        body = given.get("body")
        if isinstance(body, dict) and "prompt" in body:
            return "text_completion"
        return "chat.completion"
    return _URLS[read_value(OneOf(tuple(_URLS)), "url", url)]


def read_body(given: Mapping[str, object], form: Form, defaults: BatchDefaults) -> Call:
    """Return a line's request. Raises UsageError."""
    refuse_unknown(given, _LINE)
    if given.get("method", "POST") != "POST":
        raise UsageError(f"method must be POST, not {shown(given['method'])}")
    body = {key: value for key, value in object_named("body", given.get("body")).items() if value is not None}
    refuse_unknown(body, (_FIELDS[form] - _NOT_HERE) | _IGNORED, " in body")
    for key, value in _FIXED.items():
        if key in body and (body[key] != value or type(body[key]) is not type(value)):  # True is equal to 1
            raise UsageError(f"{key} can only be {shown(value)}, not {shown(body[key])}")
    if _CONTENT[form] not in body:
        raise UsageError(f"a body for this url needs {_CONTENT[form]}")
    if form == "chat.completion":
        call = read_chat(body, strict=True)
        call = replace(call, messages=with_system(call.messages, defaults.system))
    else:
        call = read_completion(body)
        if len(call.prompts) > 1:
            raise UsageError("prompt can only be one text")
    if call.model is not None and defaults.names is not None and call.model not in defaults.names:
        raise UsageError(
            f"the line asks for model {shown(call.model)}, but {defaults.model} answers",
            "-m MODEL has that model answer every line, whatever model they name",
        )
    return call


def response(
    digest: str, name: str | int | None, status: int, body: Mapping[str, object], error: Mapping[str, object] | None
) -> dict[str, object]:
    """Return a line of the output in this form.

    digest: of the request.
    name: `custom_id` of the request's line.
    status: as of an HTTP response.
    body: of the response.
    error: None for a response of status 200.
    """
    return {
        "id": f"{PREFIX}{digest}",
        "custom_id": name,
        "response": {"status_code": status, "request_id": f"req_{digest}", "body": body},
        "error": error,
    }
