"""A line of the output: the answer to one request or what went wrong with it, in the form the request came in.

Every result says what it cost, and names its request by its digest, by which an interrupted batch is gone on with.
"""

import time
from dataclasses import dataclass
from typing import Any

from headrace.app.batch.line import BadLine, Line
from headrace.app.batch.openai_form import PREFIX, response
from headrace.models.text.answer import EndedBy
from headrace.runtime.engine.request import Finished
from headrace.runtime.errors import ContextLimitError, HeadraceError, NotEnoughMemoryError, UsageError
from headrace.runtime.metrics.telemetry import Summary, in_milliseconds

_CODES = {
    ContextLimitError: ("context_length_exceeded", 400),
    UsageError: ("invalid_request", 400),
    NotEnoughMemoryError: ("not_enough_memory", 507),
}
_FAILED = ("failed", 500)
_BEGINNINGS = (b'{"line": ', f'{{"id": "{PREFIX}'.encode())  # of a result in either form, as it is written


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request was answered. Times in seconds since it was taken up, tokenization included.

    ttft_s: to the first text; None where there was none. e2e_s: to the end.
    """

    text: str
    finished: Finished
    ended_by: EndedBy
    seed: int | None
    ttft_s: float | None
    e2e_s: float


def result(line: Line, answer: Answer, model: str) -> dict[str, Any]:
    """The result of a request that was answered."""
    summary = answer.finished.summary
    usage = {
        "prompt_tokens": summary.prompt_tokens,
        "completion_tokens": summary.completion_tokens,
        "total_tokens": summary.prompt_tokens + summary.completion_tokens,
    }
    told = {"ended_by": answer.ended_by, "seed": answer.seed, "timing": _timing(answer, summary)}
    reason = answer.finished.reason
    if line.form == "plain":
        asked = {"line": line.number, "id": line.name, "request": line.digest, "model": model}
        usage |= {"cached_tokens": summary.reused_tokens}
        return {**asked, "text": answer.text, "finish_reason": reason, "usage": usage, **told, "error": None}
    said = (
        {"message": {"role": "assistant", "content": answer.text}}
        if line.form == "chat.completion"
        else {"text": answer.text}
    )
    body = {
        "id": f"{'chatcmpl' if line.form == 'chat.completion' else 'cmpl'}-{line.digest}",
        "object": line.form,
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, **said, "logprobs": None, "finish_reason": reason}],
        "usage": {**usage, "prompt_tokens_details": {"cached_tokens": summary.reused_tokens}},
        **told,
    }
    return response(line.digest, line.name, 200, body, None)


def failure(line: Line | BadLine, error: HeadraceError) -> dict[str, Any]:
    """The result of a line that has no answer."""
    code, status = next((said for kind, said in _CODES.items() if isinstance(error, kind)), _FAILED)
    told = {"code": code, "message": str(error)} | ({"hint": error.hint} if error.hint else {})
    if line.form == "plain":
        return {"line": line.number, "id": line.name, "request": line.digest, "error": told}
    body = {"error": {"message": str(error), "type": "invalid_request_error" if status == 400 else "server_error"}}
    return response(line.digest, line.name, status, {"error": {**body["error"], "param": None, "code": code}}, told)


def digest_of(document: object) -> tuple[str, bool]:
    """(digest of the request, whether it was answered) of a line of an output. Raises ValueError for any other."""
    match document:
        case {"request": str(digest), "error": error}:
            return digest, error is None
        case {"id": str(name), "custom_id": _, "response": dict(), "error": error} if name.startswith(PREFIX):
            return name.removeprefix(PREFIX), error is None
    raise ValueError("no result of a batch")


def may_begin(torn: bytes) -> bool:
    """Whether a line without an end may be one of an output that was cut off."""
    return any(begin.startswith(torn) or torn.startswith(begin) for begin in _BEGINNINGS)


def _timing(answer: Answer, summary: Summary) -> dict[str, Any]:
    return {
        "ttft_s": answer.ttft_s,
        "prefill_s": summary.prefill_s,
        "itl_ms": in_milliseconds(summary.itl),
        "decode_tokens_per_second": summary.decode_tokens_per_second,
        "e2e_s": answer.e2e_s,
    }
