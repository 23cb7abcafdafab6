"""The OpenAI batch form: requests for chat completions and completions, and results as that API writes them.

    {"custom_id": "q1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...], "max_tokens": 64}}

A body takes the API's names, and top_k, min_p, repetition_penalty, speculate, thinking, regex and grammar. Parameters
that would change the answer and are not supported (several choices) are refused by name. Source of the shapes:
the API reference of OpenAI, sections Batch, Chat and Completions.
"""

from collections.abc import Mapping

from headrace.app.answer.options import GRAMMARS, OPTIONS
from headrace.app.answer.response_format import read_response_format
from headrace.app.answer.token_reports import read_logprobs
from headrace.app.batch.fields import TOOLS, conversation, line_tools, prompt_text, read_options, refuse_unknown
from headrace.app.batch.line import Asked, Defaults, Form
from headrace.runtime.config.value_types import JSONObject, OneOf, Text, read_value, shown
from headrace.runtime.errors import UsageError

PREFIX = "batch_req_"
"""Beginning of a result's id; the rest is the request's digest."""
_LINE = frozenset({"custom_id", "method", "url", "body"})
_URLS: Mapping[str, Form] = {"/v1/chat/completions": "chat.completion", "/v1/completions": "text_completion"}
# Parameters that may only have the value of the default behaviour.
_FIXED: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stream": (False,),
    "echo": (False,),
}
_IGNORED = frozenset({
    "user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
    "verbosity", "stream_options", "modalities", "prediction",
})  # fmt: skip
_LEVELS = {"minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high"}
_CHAT = TOOLS | {"logprobs", "top_logprobs", "reasoning_effort"}
_BODY = OPTIONS.keys() | _FIXED.keys() | _IGNORED | {"model", "max_completion_tokens", "response_format"}
_CONTENT: Mapping[Form, str] = {"chat.completion": "messages", "text_completion": "prompt"}


def form_of(given: Mapping[str, object]) -> Form:
    """Return the API call of a line, by its url, else by its body. Raises UsageError."""
    url = given.get("url")
    if url is None:
        body = given.get("body")
        return "text_completion" if isinstance(body, dict) and "prompt" in body else "chat.completion"
    if not isinstance(url, str) or url not in _URLS:
        raise UsageError(f"url must be one of {', '.join(_URLS)}, not {shown(url)}")
    return _URLS[url]


def read_body(given: Mapping[str, object], form: Form, defaults: Defaults) -> Asked:
    """Return a line's request. Raises UsageError."""
    refuse_unknown(given, _LINE)
    if given.get("method", "POST") != "POST":
        raise UsageError(f"method must be POST, not {shown(given['method'])}")
    body = given.get("body")
    if not isinstance(body, dict):
        raise UsageError(f"body must be an object, not {shown(body)}")
    body = {key: value for key, value in body.items() if value is not None}
    content = _CONTENT[form]
    known = _BODY | {content} | (_CHAT if form == "chat.completion" else set())
    refuse_unknown(body, frozenset(known), " in body")
    _check_fixed(body)
    _check_model(body, defaults)
    if "response_format" in body:
        wanted = read_response_format(body["response_format"])
        if wanted and body.keys() & GRAMMARS:
            raise UsageError("response_format excludes schema, regex and grammar")
        body |= wanted
    if "reasoning_effort" in body:
        _set_effort(body)
    if content not in body:
        raise UsageError(f"a body for this url needs {content}")
    options = read_options(body)
    if form == "chat.completion":
        logprobs = read_logprobs(body.get("logprobs"), body.get("top_logprobs"))
        return Asked(conversation(body["messages"], defaults.system), options, line_tools(body), logprobs)
    if options.thinking is not None:
        raise UsageError("thinking needs a conversation, not a text to continue")
    return Asked(prompt_text(body["prompt"]), options)


def _set_effort(body: dict[str, object]) -> None:
    """Hand on `reasoning_effort`, a hint that models without levels ignore. Raises UsageError for an unknown one."""
    effort = read_value(OneOf(("none", *_LEVELS)), "reasoning_effort", body["reasoning_effort"])
    if effort == "none":
        body.setdefault("thinking", False)
        return
    variables = read_value(JSONObject(), "chat_template_kwargs", body.get("chat_template_kwargs", {}))
    body["chat_template_kwargs"] = {"reasoning_effort": _LEVELS[effort], **variables}


def _check_fixed(body: Mapping[str, object]) -> None:
    for key, allowed in _FIXED.items():
        if key in body and not any(body[key] == value and type(body[key]) is type(value) for value in allowed):
            raise UsageError(f"{key} can only be {shown(allowed[0])}, not {shown(body[key])}")


def _check_model(body: Mapping[str, object], defaults: Defaults) -> None:
    if "model" not in body or defaults.names is None:
        return
    if read_value(Text(), "model", body["model"]) not in defaults.names:
        raise UsageError(
            f"the line asks for model {shown(body['model'])}, but {defaults.model} answers",
            "-m MODEL has that model answer every line, whatever model they name",
        )


def response(
    digest: str, name: str | int | None, status: int, body: Mapping[str, object], error: Mapping[str, object] | None
) -> dict[str, object]:
    """Return a line of the output in this form."""
    return {
        "id": f"{PREFIX}{digest}",
        "custom_id": name,
        "response": {"status_code": status, "request_id": f"req_{digest}", "body": body},
        "error": error,
    }
