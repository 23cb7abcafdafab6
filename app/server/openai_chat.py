"""`/v1/chat/completions`: bodies of OpenAI's chat API as calls, answers as chunks or one document.

Source of the shapes: OpenAI's API reference, sections Chat and Streaming.
"""

import time
from collections.abc import Mapping
from secrets import token_hex

from headrace.app.answer.messages import read_messages
from headrace.app.answer.token_reports import chat_logprobs, read_logprobs
from headrace.app.engine.events import Delta, Done, Event
from headrace.app.engine.telemetry import document
from headrace.app.server.call import EFFORTS, Call
from headrace.app.server.errors import ApiError, refused
from headrace.app.server.explain import prefix_of
from headrace.app.server.fields import MAX_CHOICES, Body, answer_options, flag, mapping, read, refuse
from headrace.app.server.form import COMMENT, data
from headrace.app.server.parts import AnswerParts, CallPart, Part, token_reports
from headrace.app.server.structure import format_options
from headrace.app.server.tools import chat_tools, custom_input, custom_names
from headrace.app.server.usage import request_usage
from headrace.runtime.config.value_types import OneOf, Text, Whole

_RENAMED = {"max_completion_tokens": "max_tokens", "repeat_penalty": "repetition_penalty"}
# Of OpenAI's API, of vLLM's and of llama.cpp's server: each changes the answer.
REFUSED = frozenset({
    "functions", "function_call", "audio", "web_search_options", "best_of", "echo", "use_beam_search",
    "length_penalty", "min_tokens", "ignore_eos", "bad_words", "allowed_token_ids", "prompt_logprobs",
    "guided_grammar", "json_schema", "documents", "mirostat", "typical_p", "tfs_z",
    "top_n_sigma", "xtc_probability", "dry_multiplier", "dynatemp_range", "chat_template", "logits_processors",
})  # fmt: skip
NEUTRAL: Mapping[str, float] = {"best_of": 1, "typical_p": 1, "tfs_z": 1, "length_penalty": 1, "top_n_sigma": -1}
"""Values of these fields that change nothing."""


def read_call(body: Body) -> Call:
    """Return the call of a body. Raises ApiError and UsageError that name the field."""
    refuse(body, REFUSED, NEUTRAL)
    if body.get("modalities") not in (None, [], ["text"]):
        raise refused("modalities can only be text", "modalities")
    messages = read_messages(body.get("messages"))
    continue_text = ""
    if flag(body, "continue_final_message"):
        last = messages.pop()
        if last["role"] != "assistant" or "tool_calls" in last or not messages:
            raise refused("continue_final_message needs a last message of the assistant", "continue_final_message")
        continue_text = str(last["content"])
    return Call(
        model=read(body, "model", Text()),
        messages=messages,
        continue_text=continue_text,
        options=answer_options(_without_switch(body), _RENAMED, format_options(body)),
        count=read(body, "n", Whole(1, MAX_CHOICES)) or 1,
        stream=flag(body, "stream"),
        include_usage=flag(mapping(body, "stream_options"), "include_usage"),
        logprobs=read_logprobs(body.get("logprobs"), body.get("top_logprobs")),
        effort=read(body, "reasoning_effort", OneOf(EFFORTS)),
        budget=_thinking_switch(body),
        tools=chat_tools(body),
        custom=custom_names(body),
        explain=flag(mapping(body, "headrace"), "explain"),
        steps=flag(mapping(body, "headrace"), "steps"),
    )


def _thinking_switch(body: Body) -> bool | None:
    """Return the switch of thinking: vLLM's template variables, or DeepSeek's and Anthropic's object."""
    variables = mapping(body, "chat_template_kwargs")
    switch = next((flag(variables, name) for name in ("enable_thinking", "thinking") if name in variables), None)
    if isinstance(given := body.get("thinking"), dict):
        return read(given, "type", OneOf(("enabled", "disabled", "auto", "adaptive"))) != "disabled"
    return switch


def _without_switch(body: Body) -> Body:
    """Return the body without a `thinking` that is an object, which is no answer option."""
    return {**body, "thinking": None} if isinstance(body.get("thinking"), dict) else body


class ChatForm:
    """Answers as chat completions."""

    keep_alive = COMMENT

    def __init__(self, call: Call, model: str) -> None:
        """model: the name of the one that answers."""
        self._call = call
        self._answers = [AnswerParts() for _ in range(call.choices)]
        self._own: dict[str, object] = {}
        self._about = {"id": f"chatcmpl-{token_hex(12)}", "created": int(time.time()), "model": model}

    def begin(self) -> bytes:
        """Return a first chunk per choice, with its role."""
        first = {"role": "assistant", "content": ""}
        return data(self._chunk(index, first) for index in range(len(self._answers)))

    def take(self, choice: int, event: Event) -> bytes:
        """Return the chunks of an event, figures after its text."""
        return self._text(choice, event) + self._figures(event)

    def _figures(self, event: Event) -> bytes:
        """Return a chunk of what only headrace's own clients ask for."""
        extra = prefix_of(self._call, event)
        self._own |= extra
        if self._call.steps and (figures := document(event)) is not None:
            extra |= {"event": figures[0], "data": figures[1]}
        return data([{**self._head("chat.completion.chunk"), "choices": [], "headrace": extra}]) if extra else b""

    def _text(self, choice: int, event: Event) -> bytes:
        if not isinstance(event, Delta | Done):
            return b""
        answer = self._answers[choice]
        deltas = [delta for part in answer.take(event) if (delta := self._delta(part))]
        if isinstance(event, Done):
            deltas += [
                {"tool_calls": [{"index": index, "custom": {"input": custom_input(call.arguments)}}]}
                for index, call in enumerate(answer.calls)
                if call.name in self._call.custom
            ]
        tokens = token_reports(event) if isinstance(event, Delta) else []
        reports = chat_logprobs(tokens) if tokens else None
        shown = deltas or ([{"content": ""}] if reports else [])
        chunks = [
            self._chunk(choice, delta, logprobs=None if number else reports) for number, delta in enumerate(shown)
        ]
        if isinstance(event, Done):
            chunks.append(self._chunk(choice, {}, finish_reason=_finish_reason(answer)))
        return data(chunks)

    def _delta(self, part: Part) -> dict[str, object] | None:
        """Return the `delta` of a part; None for a piece of a custom tool's JSON, whose text comes at the end."""
        if not isinstance(part, CallPart):
            return {"content" if part.kind == "content" else "reasoning_content": part.text}
        if part.name in self._call.custom:
            begun = {"id": part.id, "type": "custom", "custom": {"name": part.name, "input": ""}}
            return {"tool_calls": [{"index": part.index, **begun}]} if part.first else None
        more = _call(part, self._call.custom) if part.first else {"function": {"arguments": part.arguments}}
        return {"tool_calls": [{"index": part.index, **more}]}

    def end(self) -> bytes:
        """Return the chunk with the usage, if asked for, and the end mark."""
        usage = b""
        if self._call.include_usage:
            usage = data([{**self._head("chat.completion.chunk"), "choices": [], "usage": self._usage()}])
        return usage + b"data: [DONE]\n\n"

    def failed(self, error: ApiError) -> bytes:
        """Return the error as an object of the stream, and the end mark."""
        return data([error.openai()]) + b"data: [DONE]\n\n"

    def document(self) -> dict[str, object]:
        """Return the chat completion."""
        with_logprobs = self._call.logprobs is not None
        choices = [
            _choice(answer, index, self._call.custom, with_logprobs=with_logprobs)
            for index, answer in enumerate(self._answers)
        ]
        extra = {"headrace": self._own} if self._own else {}
        return {**self._head("chat.completion"), "choices": choices, "usage": self._usage(), **extra}

    def _head(self, kind: str) -> dict[str, object]:
        return {"id": self._about["id"], "object": kind, **self._about, "system_fingerprint": "headrace"}

    def _chunk(
        self, index: int, delta: Mapping[str, object], *, logprobs: object = None, finish_reason: str | None = None
    ) -> dict[str, object]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        usage = {"usage": None} if self._call.include_usage else {}
        return {**self._head("chat.completion.chunk"), "choices": [choice], **usage}

    def _usage(self) -> dict[str, object]:
        ends = [answer.end for answer in self._answers if answer.end is not None]
        return request_usage([end.summary for end in ends], sum(end.thinking_tokens for end in ends))


def _choice(answer: AnswerParts, index: int, custom: frozenset[str], *, with_logprobs: bool) -> dict[str, object]:
    """Return one choice of the document."""
    message: dict[str, object] = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message |= {"content": answer.content or None, "tool_calls": [_call(call, custom) for call in answer.calls]}
    return {
        "index": index,
        "message": message,
        "logprobs": chat_logprobs(answer.tokens) if with_logprobs else None,
        "finish_reason": _finish_reason(answer),
        "seed": answer.end.seed if answer.end is not None else None,
    }


def _call(call: CallPart, custom: frozenset[str]) -> dict[str, object]:
    if call.name in custom:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": custom_input(call.arguments)}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _finish_reason(answer: AnswerParts) -> str | None:
    reason = answer.end.reason if answer.end is not None else None
    return "tool_calls" if answer.calls and reason == "stop" else reason
