"""`/v1/completions`: texts continued as they are, in OpenAI's legacy form.

Source of the shapes: OpenAI's API reference, section Completions.
"""

import time
from secrets import token_hex
from typing import Any

from headrace.app.engine.events import Delta, Done, Event
from headrace.app.server.call import Call
from headrace.app.server.errors import ApiError, refused
from headrace.app.server.explain import prefix_of
from headrace.app.server.fields import MAX_CHOICES, Body, answer_options, flag, mapping, read, refuse
from headrace.app.server.form import COMMENT, data
from headrace.app.server.openai_chat import REFUSED
from headrace.app.server.parts import token_reports
from headrace.app.server.structure import format_options
from headrace.app.server.usage import request_usage
from headrace.models.text.events import TokenReport
from headrace.runtime.config.value_types import Text, Whole, shown
from headrace.runtime.engine.request import Finished

MAX_LOGPROBS = 5


def read_call(body: Body) -> Call:
    """Return the call of a body. Raises ApiError and UsageError that name the field."""
    refuse(body, REFUSED - {"best_of"} | {"tools"})
    if body.get("best_of") not in (None, 1, body.get("n", 1)):
        raise refused("best_of is not supported", "best_of")
    options = answer_options(body, {"repeat_penalty": "repetition_penalty"}, format_options(body))
    if options.thinking is not None:
        raise refused("thinking needs a conversation, not a text to continue", "thinking")
    prompts = _prompts(body.get("prompt"))
    count = read(body, "n", Whole(1, MAX_CHOICES)) or 1
    if len(prompts) * count > MAX_CHOICES:
        raise refused(f"prompt: at most {MAX_CHOICES} answers a request", "prompt")
    return Call(
        model=read(body, "model", Text()),
        prompts=prompts,
        suffix=read(body, "suffix", Text()) or None,
        options=options,
        count=count,
        stream=flag(body, "stream"),
        include_usage=flag(mapping(body, "stream_options"), "include_usage"),
        logprobs=read(body, "logprobs", Whole(0, MAX_LOGPROBS)),
        explain=flag(mapping(body, "headrace"), "explain"),
    )


def _prompts(value: object) -> list[str]:
    prompts: list[Any] = value if isinstance(value, list) else [value]
    if not prompts or not all(isinstance(prompt, str) and prompt for prompt in prompts):
        raise refused(f"prompt must be a text or a list of texts, not empty, not {shown(value)}", "prompt")
    return prompts


class CompletionForm:
    """Answers as text completions."""

    keep_alive = COMMENT

    def __init__(self, call: Call, model: str) -> None:
        """model: the name of the one that answers."""
        self._call = call
        self._texts: list[list[str]] = [[] for _ in range(call.choices)]
        self._tokens: list[list[TokenReport]] = [[] for _ in range(call.choices)]
        self._ends: dict[int, Finished] = {}
        self._own: dict[str, object] = {}
        created = int(time.time())
        self._head = {"id": f"cmpl-{token_hex(12)}", "object": "text_completion", "created": created, "model": model}

    def begin(self) -> bytes:
        """Return nothing."""
        return b""

    def take(self, choice: int, event: Event) -> bytes:
        """Return the chunk of an event."""
        if extra := prefix_of(self._call, event):
            self._own |= extra
            return data([{**self._head, "choices": [], "headrace": extra}])
        if isinstance(event, Delta):
            return self._text(choice, event.text, token_reports(event))
        if isinstance(event, Done):
            self._ends[choice] = event.end
            return data([self._chunk(choice, "", None, event.end.reason)])
        return b""

    def _text(self, choice: int, text: str, tokens: list[TokenReport]) -> bytes:
        if not text and not tokens:
            return b""
        position = sum(map(len, self._texts[choice]))
        self._texts[choice].append(text)
        self._tokens[choice].extend(tokens)
        return data([self._chunk(choice, text, _reports(tokens, position) if tokens else None)])

    def end(self) -> bytes:
        """Return the chunk with the usage, if asked for, and the end mark."""
        usage = data([{**self._head, "choices": [], "usage": self._usage()}]) if self._call.include_usage else b""
        return usage + b"data: [DONE]\n\n"

    def failed(self, error: ApiError) -> bytes:
        """Return the error as an object of the stream, and the end mark."""
        return data([error.openai()]) + b"data: [DONE]\n\n"

    def document(self) -> dict[str, object]:
        """Return the text completion."""
        choices = [
            {
                "index": index,
                "text": "".join(texts),
                "logprobs": _reports(tokens, 0) if self._call.logprobs is not None else None,
                "finish_reason": self._ends[index].reason,
                "seed": self._ends[index].seed,
            }
            for index, (texts, tokens) in enumerate(zip(self._texts, self._tokens, strict=True))
        ]
        extra = {"headrace": self._own} if self._own else {}
        return {**self._head, "choices": choices, "usage": self._usage(), **extra}

    def _chunk(self, index: int, text: str, logprobs: object, reason: str | None = None) -> dict[str, object]:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head, "choices": [choice]}

    def _usage(self) -> dict[str, object]:
        summaries = [self._ends[index].summary for index in sorted(self._ends)]
        of_each_prompt = summaries[:: self._call.count]
        return request_usage(summaries, prompt_tokens=sum(summary.prompt_tokens for summary in of_each_prompt))


def _reports(tokens: list[TokenReport], position: int) -> dict[str, object]:
    """Return the `logprobs` object of some tokens; position: of the first in the text, in characters."""
    offsets = []
    for token in tokens:
        offsets.append(position)
        position += len(token.text)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [dict(token.top) for token in tokens],
        "text_offset": offsets,
    }
