"""Results: an answer or an error as a line of the output, in the form of its request.

Every result names its request by digest, so that an interrupted batch can be resumed: `result` and `failure` write it,
`digest_of` reads it again, and `may_begin` knows how a written line begins. A change of one is a change of all.
docs/batch.md describes the keys.

Guard: tests/app/batch/test_output.py.
"""

import time
from collections.abc import Mapping

from headrace.app.answer.answer import Answer
from headrace.app.answer.openai_form import chat_choice, text_choice, written_call
from headrace.app.answer.usage import openai_usage, token_counts
from headrace.app.batch.parse import BadLine, BatchLine
from headrace.models.loading.load import LoadedModel
from headrace.runtime.errors import ContextLimitError, HeadraceError, NotEnoughMemoryError, UsageError

_CODES = {  # code and HTTP status of errors that a client can act on
    ContextLimitError: ("context_length_exceeded", 400),
    UsageError: ("invalid_request", 400),
    NotEnoughMemoryError: ("not_enough_memory", 507),
}
_FAILED = ("failed", 500)
_PREFIX = "batch_req_"
"""Beginning of a result's id in the OpenAI batch form; the rest is the request's digest."""
_BEGINNINGS = (b'{"line": ', f'{{"id": "{_PREFIX}'.encode())  # of a written result, in either form


def result(line: BatchLine, answer: Answer, model: LoadedModel) -> dict[str, object]:
    """Return the result of an answered request."""
    summary = answer.end.summary
    details: dict[str, object] = {
        "ended_by": answer.end.ended_by,
        "seed": answer.end.seed,
        "sampling": answer.sampling(),
        "timing": answer.timing(),
    }
    if answer.unchecked_tools:
        details["unchecked_tools"] = answer.unchecked_tools
    # A request that is answered again has the same identifiers: they follow from its digest.
    call = line.call
    calls = [
        written_call(f"call_{line.digest[:16]}_{n}", made.name, made.arguments, call.custom)
        for n, made in enumerate(answer.calls)
    ]

    # headrace's own form
    if line.form == "plain":
        request = {"line": line.number, "id": line.name, "request": line.digest, "model": model.name}
        counts = token_counts(summary.prompt_tokens, summary.completion_tokens)
        usage = {**counts, "cached_tokens": summary.reused_tokens}
        tool_calls: dict[str, object] = {}
        if call.tools is not None:
            tool_calls["tool_calls"] = calls
        text = {"text": answer.text, **tool_calls, "finish_reason": answer.finish_reason}
        return {**request, **text, "usage": usage, **details, "error": None}

    # OpenAI's: a response with the body of the endpoint
    reports = None
    if call.logprobs is not None:
        reports = answer.reports
    if line.form == "chat.completion":
        prefix = "chatcmpl"
        choice = chat_choice(0, answer.end, answer.content, thinking=answer.thinking, calls=calls, reports=reports)
    else:
        prefix = "cmpl"
        choice = text_choice(0, answer.end, answer.text, reports)
    body = {
        "id": f"{prefix}-{line.digest}",
        "object": line.form,
        "created": int(time.time()),
        "model": model.name,
        "choices": [choice],
        "usage": openai_usage([answer.end]),
        **details,
    }
    return _response(line.digest, line.name, 200, body, None)


def failure(line: BatchLine | BadLine, error: HeadraceError) -> dict[str, object]:
    """Return the result of a line that has no answer."""
    code, status = next(
        (code_and_status for kind, code_and_status in _CODES.items() if isinstance(error, kind)), _FAILED
    )
    details = {"code": code, "message": str(error)}
    if error.hint:
        details["hint"] = error.hint
    if line.form == "plain":
        return {"line": line.number, "id": line.name, "request": line.digest, "error": details}
    kind = "server_error"
    if status == 400:
        kind = "invalid_request_error"
    body = {"message": str(error), "type": kind, "param": None, "code": code}
    return _response(line.digest, line.name, status, {"error": body}, details)


def _response(
    digest: str, name: str | int | None, status: int, body: Mapping[str, object], error: Mapping[str, object] | None
) -> dict[str, object]:
    """Return a line of the output in the OpenAI batch form.

    digest: of the request.
    name: `custom_id` of the request's line.
    status: as of an HTTP response.
    body: of the response.
    error: None for a response of status 200.
    """
    return {
        "id": f"{_PREFIX}{digest}",
        "custom_id": name,
        "response": {"status_code": status, "request_id": f"req_{digest}", "body": body},
        "error": error,
    }


def digest_of(document: object) -> tuple[str, bool]:
    """Return a result's digest, and True if it has an answer. Raises ValueError for any other document."""
    match document:
        case {"request": str(digest), "error": error}:
            return digest, error is None
        case {"id": str(name), "custom_id": _, "response": dict(), "error": error} if name.startswith(_PREFIX):
            return name.removeprefix(_PREFIX), error is None
    raise ValueError("no result of a batch")


def may_begin(torn: bytes) -> bool:
    """Return True if a line without an end may be the beginning of a result."""
    return any(begin.startswith(torn) or torn.startswith(begin) for begin in _BEGINNINGS)
