"""`/v1/messages`: bodies of Anthropic's API as calls, answers as events or one message.

`application.py` routes to `read_call` and `MessageForm`; `form.py` says what a form promises. Messages become those of
a chat template, as `app.answer.messages` makes them of OpenAI's.

Source of the shapes: Anthropic's API reference, sections Messages, Streaming and Token counting.

Guard: tests/app/server/test_anthropic.py.
"""

import json
from collections.abc import Mapping
from secrets import token_hex

from headrace.app.answer.call import EFFORTS, Call
from headrace.app.answer.fields import (
    Body,
    answer_options,
    flag,
    items,
    mapping,
    object_named,
    read,
    refuse,
    required_texts,
)
from headrace.app.answer.messages import MAX_MESSAGES, name_results, newest_user, not_shown, tool_call
from headrace.app.answer.response_format import flat_format
from headrace.app.answer.tools import MAX_TOOLS, read_tools, tool_kind
from headrace.app.answer.usage import timings
from headrace.app.engine.events import Delta, Done, Event, Prefill
from headrace.app.server.errors import ApiError
from headrace.app.server.explain import prefix_of
from headrace.app.server.form import named_event
from headrace.app.server.parts import AnswerParts, CallPart, Part
from headrace.models.checkpoint.side_file import without_nulls
from headrace.models.text.tools.use import ToolUse
from headrace.runtime.config.value_types import OneOf, Text, shown
from headrace.runtime.errors import UsageError

REFUSED = frozenset({"mcp_servers", "container"})
_BILLING = "x-anthropic-billing-header:"  # begins a system text that differs in every request and means nothing
# Keys of a tool here, and those of OpenAI's functions.
_FUNCTION_KEYS = {"name": "name", "description": "description", "input_schema": "parameters"}
# Blocks before their text.
_EMPTY: dict[str, dict[str, object]] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}
# Types of `thinking` without a budget; "enabled" has one.
_THINKING: dict[str, bool] = {"disabled": False, "adaptive": True}


def read_call(body: Body) -> Call:
    """Return the call of a body. A last message of the assistant is the beginning of the answer.

    Raises UsageError that names the field.
    """
    refuse(body, REFUSED)
    output = mapping(body, "output_config")
    format_name = "output_config.format"
    asked_format = mapping(output, "format")
    if not asked_format:
        format_name = "output_format"  # an older name of the field
        asked_format = mapping(body, "output_format")
    structure = flat_format(asked_format, format_name)
    messages = read_messages(body)
    continue_text = ""
    if messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
        continue_text = str(messages.pop()["content"]).rstrip()
    if not any(message["role"] in ("user", "tool") for message in messages):
        raise UsageError("messages needs a message of the user")
    return Call(
        model=read(body, "model", Text()),
        messages=messages,
        options=answer_options(body, {"stop_sequences": "stop"}, {**structure, "thinking": None}),
        stream=flag(body, "stream"),
        effort=read(output, "effort", OneOf((*EFFORTS, "max"))),
        budget=_budget(mapping(body, "thinking")),
        continue_text=continue_text,
        tools=_tools(body),
        explain=flag(mapping(body, "headrace"), "explain"),
    )


def read_messages(body: Body) -> list[dict[str, object]]:
    """Return the conversation, messages of the user in a row as one. Raises UsageError."""
    given = items(body, "messages", MAX_MESSAGES)
    if not given:
        raise UsageError("messages must be a list with at least one message")
    system = _system(body.get("system"))
    messages: list[dict[str, object]] = []
    if system:
        messages.append({"role": "system", "content": system})
    newest = newest_user(given)
    for index, value in enumerate(given):
        for message in _messages(value, f"messages[{index}]", in_history=index != newest):
            last = messages[-1] if messages else None
            if last is not None and last["role"] == message["role"] == "user":
                last["content"] = f"{last['content']}\n\n{message['content']}"
            else:
                messages.append(message)
    return name_results(messages)


def _system(value: object) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise UsageError(f"system must be a text or a list of text blocks, not {shown(value)}")
    texts = [_text(block, f"system[{index}]") for index, block in enumerate(value)]
    return "\n\n".join(text for text in texts if not text.startswith(_BILLING))


def _text(block: object, where: str, *, in_history: bool = False) -> str:
    if isinstance(block, dict):
        words = not_shown(block.get("type"))
        if in_history and words is not None:
            return words
        if block.get("type") == "text" and isinstance(block.get("text"), str):
            return str(block["text"])
    raise UsageError(f"{where} must be a text block, not {shown(block)}")


def _messages(value: object, where: str, *, in_history: bool) -> list[dict[str, object]]:
    """Return the messages that one stands for: results of tools, then the text beside them.

    where: path of the message, for errors.
    in_history: it is not the newest of the user, so that blocks which cannot be shown become words.
    """
    given = object_named(where, value)
    role = given.get("role")
    content = given.get("content")
    if role not in ("user", "assistant", "system"):
        raise UsageError(f"{where}.role must be user or assistant, not {shown(role)}")
    message: dict[str, object] = {"role": role}
    if isinstance(content, str):
        return [message | {"content": content}]
    if not isinstance(content, list):
        raise UsageError(f"{where}.content must be a text or a list of blocks, not {shown(content)}")

    # Sort the blocks by kind: a template's message has one text, one list of calls, and results apart from it.
    texts = []
    results = []
    calls = []
    thoughts = []
    for index, block in enumerate(content):
        path = f"{where}.content[{index}]"
        match block:
            case {"type": "thinking", "thinking": str(thinking)}:
                thoughts.append(thinking)
            case {"type": "redacted_thinking"}:
                pass  # encrypted for Anthropic's own models
            case {"type": "tool_use"}:
                identifier, name = required_texts(block, path, "id", "name")
                arguments = object_named(f"{path}.input", block.get("input"))
                calls.append(tool_call(identifier, name, json.dumps(arguments, ensure_ascii=False)))
            case {"type": "tool_result"}:
                (identifier,) = required_texts(block, path, "tool_use_id")
                results.append(_result(block, identifier, path))
            case _:
                texts.append(_text(block, path, in_history=in_history))

    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    if results and not texts and not calls:
        return results
    return [*results, message | {"content": "\n\n".join(texts)}]


def _result(block: Body, identifier: str, where: str) -> dict[str, object]:
    """Return the message of a tool's result."""
    content = block.get("content")
    if isinstance(content, list):
        content = "\n".join(_text(part, where, in_history=True) for part in content)
    if not isinstance(content, str | None):
        raise UsageError(f"{where}.content must be a text or a list of text blocks, not {shown(content)}")
    text = content or ""
    if block.get("is_error"):
        text = f"error: {text}"
    return {"role": "tool", "content": text, "tool_call_id": identifier}


def _budget(value: Body) -> bool | int | None:
    """Return what `thinking` asks for: a budget in tokens, on or off, or nothing."""
    kind = value.get("type")
    if kind is None:
        return None
    if kind == "enabled":
        tokens = value.get("budget_tokens")
        if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
            raise UsageError(f"thinking.budget_tokens must be 1 or more, not {shown(tokens)}")
        return tokens
    if not isinstance(kind, str) or kind not in _THINKING:
        raise UsageError(f"thinking.type must be enabled, disabled or adaptive, not {shown(kind)}")
    return _THINKING[kind]


def _tools(body: Body) -> ToolUse | None:
    """Return the tools that the client runs."""
    tools = [_function(tool) for tool in items(body, "tools", MAX_TOOLS) if tool_kind(tool) in (None, "custom")]
    given = mapping(body, "tool_choice")
    choice: object = {"any": "required", "none": "none"}.get(str(given.get("type")), "auto")
    if given.get("type") == "tool":
        choice = {"type": "function", "function": {"name": given.get("name")}}
    elif given.get("type", "auto") not in ("auto", "any", "none"):
        raise UsageError(f"tool_choice.type must be auto, any, tool or none, not {shown(given['type'])}")
    return read_tools(tools, choice, not given.get("disable_parallel_tool_use"))


def _function(tool: Body) -> dict[str, object]:
    """Return a tool in the form of chat completions, its keys in the client's order."""
    function = {_FUNCTION_KEYS[key]: value for key, value in without_nulls(tool).items() if key in _FUNCTION_KEYS}
    return {"type": "function", "function": function}


class MessageForm:
    """One answer as a message."""

    keep_alive = named_event("ping", {"type": "ping"})

    def __init__(self, call: Call, model: str) -> None:
        """model: the name of the one that answers."""
        self._answer = AnswerParts()
        self._head = {"id": f"msg_{token_hex(12)}", "type": "message", "role": "assistant", "model": model}
        self._started = False  # `message_start` was sent
        self._call = call
        self._extension: dict[str, object] = {}  # the `headrace` field of the message, or nothing
        self._blocks: list[str] = []  # kinds of the blocks so far: text, thinking or tool_use
        self._open = False  # the last block has not ended in the stream

    def begin(self) -> bytes:
        """Return nothing: the first event has the prompt's size."""
        return b""

    def take(self, choice: int, event: Event) -> bytes:  # noqa: ARG002 - there is one
        """Return the events of an event."""
        if extra := prefix_of(self._call, event):
            self._extension = {"headrace": extra}
        pieces = [self._start(event)]
        if isinstance(event, Delta | Done):
            pieces += [self._part(part) for part in self._answer.take(event)]
        if isinstance(event, Done):
            delta, usage = self._end()
            end = {"type": "message_delta", "delta": delta, "usage": usage}
            pieces += [self._close(), named_event("message_delta", end)]
        return b"".join(pieces)

    def end(self) -> bytes:
        """Return the end of the stream."""
        return named_event("message_stop", {"type": "message_stop"})

    def failed(self, error: ApiError) -> bytes:
        """Return the error as an event."""
        return named_event("error", error.anthropic())

    def document(self) -> dict[str, object]:
        """Return the message."""
        answer = self._answer
        content: list[dict[str, object]] = []
        if answer.thinking:
            content.append({"type": "thinking", "thinking": answer.thinking, "signature": ""})
        if answer.content or not (answer.thinking or answer.calls):
            content.append({"type": "text", "text": answer.content})
        content += [{**_tool_use(call), "input": call.value} for call in answer.calls]
        delta, usage = self._end()
        return {**self._head, "content": content, **delta, "usage": usage, **self._extension}

    def _start(self, event: Event) -> bytes:
        if self._started:
            return b""
        self._started = True
        reused = 0
        fed = 0
        if isinstance(event, Prefill):
            reused = event.reused
            fed = event.total + 1  # the last token belongs to the first decode step
        usage = {"input_tokens": fed, "cache_read_input_tokens": reused, "cache_creation_input_tokens": 0}
        message: dict[str, object] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            **self._extension,
        }
        document = {"type": "message_start", "message": {**message, "usage": {**usage, "output_tokens": 0}}}
        return named_event("message_start", document)

    def _part(self, part: Part) -> bytes:
        """Return the events of a part, in a block of its kind."""
        if isinstance(part, CallPart):
            delta = {"type": "input_json_delta", "partial_json": part.arguments}
            opened = b""
            if part.first:
                opened = self._close() + self._open_block("tool_use", {**_tool_use(part), "input": {}})
            return opened + self._delta(delta)
        kind = "text" if part.kind == "content" else "thinking"
        opened = b""
        if not self._open or self._blocks[-1] != kind:
            opened = self._close() + self._open_block(kind, _EMPTY[kind])
        return opened + self._delta({"type": f"{kind}_delta", kind: part.text})

    def _open_block(self, kind: str, block: dict[str, object]) -> bytes:
        self._blocks.append(kind)
        self._open = True
        index = len(self._blocks) - 1
        return named_event(
            "content_block_start", {"type": "content_block_start", "index": index, "content_block": block}
        )

    def _delta(self, delta: Mapping[str, object]) -> bytes:
        index = len(self._blocks) - 1
        return named_event("content_block_delta", {"type": "content_block_delta", "index": index, "delta": delta})

    def _close(self) -> bytes:
        if not self._open:
            return b""
        self._open = False
        return named_event("content_block_stop", {"type": "content_block_stop", "index": len(self._blocks) - 1})

    def _end(self) -> tuple[dict[str, object], dict[str, object]]:
        """Return the end of the message and its usage."""
        end = self._answer.end
        assert end is not None
        summary = end.summary
        if end.reason == "length":
            reason = "max_tokens"
        elif end.stop_string:
            reason = "stop_sequence"
        else:
            reason = "end_turn"
        if self._answer.calls and end.reason == "stop":
            reason = "tool_use"
        usage = {
            "input_tokens": summary.prompt_tokens - summary.reused_tokens,
            "cache_read_input_tokens": summary.reused_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": summary.completion_tokens,
            "timings": timings(summary),
        }
        return {"stop_reason": reason, "stop_sequence": end.stop_string}, usage


def _tool_use(call: CallPart) -> dict[str, object]:
    return {"type": "tool_use", "id": f"toolu_{call.id.removeprefix('call_')}", "name": call.name}
