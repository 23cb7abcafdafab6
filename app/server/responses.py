"""`/v1/responses`: bodies of OpenAI's Responses API as calls, answers as events or one response. Nothing is stored.

`application.py` routes to `read_call` and `ResponseForm`. A stream and the whole response show the same items: the form
keeps `_output` (its last item may be open) and each event is made of it.

Source of the shapes: OpenAI's API reference, sections Responses and Streaming events.

Guard: tests/app/server/test_responses.py.
"""

import json
import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from secrets import token_hex
from typing import Any

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
from headrace.app.answer.messages import (
    MAX_MESSAGES,
    join_system,
    name_results,
    newest_user,
    text_content,
    tool_call,
)
from headrace.app.answer.response_format import flat_format
from headrace.app.answer.token_reports import chat_logprobs, read_logprobs
from headrace.app.answer.tools import custom_arguments, custom_input, name_in, tool_fields
from headrace.app.answer.usage import openai_usage
from headrace.app.engine.events import Delta, Done, Event
from headrace.app.server.errors import ApiError
from headrace.app.server.explain import prefix_of
from headrace.app.server.form import COMMENT, named_event
from headrace.app.server.parts import AnswerParts, CallPart, Part, token_reports
from headrace.runtime.config.value_types import OneOf, Text, read_value, shown
from headrace.runtime.engine.request import Finished
from headrace.runtime.errors import UsageError

REFUSED = frozenset({"previous_response_id", "conversation", "background", "prompt"})
# Fields of the body that a response repeats, with their defaults.
_ECHOED: dict[str, object] = {
    "instructions": None, "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "metadata": {},
    "text": {"format": {"type": "text"}},
}  # fmt: skip
_COMPACTED = (
    "[An earlier part of this conversation was shortened by another service, in a form that is not readable here.]"
)
_LOGPROBS = "message.output_text.logprobs"  # an entry of `include`
_MAX_PARTS = 1024  # of a reasoning item; this server writes one
_WRITTEN = "written"  # arguments of an open call of a custom tool, no field of the item
_USAGE_NAMES = {  # fields of `openai_usage` that this API names otherwise; all others are passed on
    "prompt_tokens": "input_tokens",
    "prompt_tokens_details": "input_tokens_details",
    "completion_tokens": "output_tokens",
    "completion_tokens_details": "output_tokens_details",
}
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def read_call(body: Body) -> Call:
    """Return the call of a body. Raises UsageError that names the field."""
    refuse(body, REFUSED)
    read(body, "truncation", OneOf(("auto", "disabled")))  # a prompt that is too long is refused either way
    structure = flat_format(mapping(mapping(body, "text"), "format"), "text.format")
    return Call(
        model=read(body, "model", Text()),
        messages=read_input(body),
        options=answer_options(body, {"max_output_tokens": "max_tokens"}, structure),
        stream=flag(body, "stream"),
        logprobs=_logprobs(body),
        effort=read(mapping(body, "reasoning"), "effort", OneOf(EFFORTS)),
        **tool_fields(body),
        explain=flag(mapping(body, "headrace"), "explain"),
        echo={name: body.get(name) or value for name, value in _ECHOED.items()},
    )


def _logprobs(body: Body) -> int | None:
    """Return the number of best tokens to report; None: off. Raises UsageError."""
    wanted = _LOGPROBS in items(body, "include", MAX_MESSAGES)
    if not wanted and body.get("top_logprobs"):
        raise UsageError(f"top_logprobs needs include: {_LOGPROBS}")
    if wanted:
        return read_logprobs(wanted, body.get("top_logprobs"))
    return None


def read_input(body: Body) -> list[dict[str, object]]:
    """Return the conversation: the instructions, then the items of the input. Raises UsageError."""
    given = body.get("input")
    if isinstance(given, str):
        entries = [{"role": "user", "content": given}]
    else:
        entries = items(body, "input", MAX_MESSAGES)
    if not entries:
        raise UsageError("input must be a text or a list with at least one item")
    instructions = read(body, "instructions", Text())
    messages: list[dict[str, object]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})

    # Items of one answer (reasoning, text, calls) become one message of the assistant; see `_assistant_message`.
    newest = newest_user(entries)
    for index, entry in enumerate(entries):
        where = f"input[{index}]"
        match entry:
            case {"type": "reasoning"}:
                _add_reasoning(messages, _reasoning(entry, where))
            case {"type": "function_call"}:
                identifier, name, arguments = required_texts(entry, where, "call_id", "name", "arguments")
                message = _assistant_message(messages)
                space = entry.get("namespace")
                if isinstance(space, str) and space:
                    name = name_in(space, name)
                message.setdefault("tool_calls", []).append(tool_call(identifier, name, arguments))
            case {"type": "custom_tool_call"}:
                identifier, name, argument = required_texts(entry, where, "call_id", "name", "input")
                message = _assistant_message(messages)
                message.setdefault("tool_calls", []).append(tool_call(identifier, name, custom_arguments(argument)))
            case {"type": "local_shell_call"}:
                (identifier,) = required_texts(entry, where, "call_id")
                action = object_named(f"{where}.action", entry.get("action"))
                message = _assistant_message(messages)
                message.setdefault("tool_calls", []).append(tool_call(identifier, "local_shell", json.dumps(action)))
            case {"type": "function_call_output" | "custom_tool_call_output"}:
                (identifier,) = required_texts(entry, where, "call_id")
                messages.append(_result(entry, identifier, where))
            case {"type": "local_shell_call_output"}:
                (identifier,) = required_texts(entry, where, "id")
                messages.append(_result(entry, identifier, where))
            case {"type": "web_search_call" | "file_search_call" | "code_interpreter_call"}:
                pass  # the service's own tool; its result is in the answer that follows
            case {"type": "compaction"}:
                messages.append({"role": "user", "content": _COMPACTED})
            case {"type": "item_reference", "id": str(identifier)}:
                raise UsageError(
                    f"{where}: item {shown(identifier)} is not stored here; send its text, with store: false"
                )
            case {"type": "message"} | {"role": _}:
                message = _message(entry, where, in_history=index != newest)
                if message["role"] == "assistant" and _has_reasoning_alone(messages):
                    messages[-1]["content"] = message["content"]
                else:
                    messages.append(message)
            case _:
                kind = entry.get("type") if isinstance(entry, dict) else entry
                raise UsageError(f"{where}: items of type {shown(kind)} are not supported")
    return name_results(join_system(messages))


def _result(entry: Body, identifier: str, where: str) -> dict[str, object]:
    """Return the result of a tool call as a message."""
    content = text_content(entry.get("output"), f"{where}.output", in_history=True)
    return {"role": "tool", "content": content, "tool_call_id": identifier}


def _add_reasoning(messages: list[dict[str, object]], text: str) -> None:
    """Begin an answer with its reasoning. The message or the calls that follow join it."""
    if _has_reasoning_alone(messages):
        text = "\n\n".join(filter(None, (str(messages.pop()["reasoning_content"]), text)))
    if text:
        messages.append({"role": "assistant", "content": "", "reasoning_content": text})


def _has_reasoning_alone(messages: Sequence[Mapping[str, object]]) -> bool:
    """Return whether the last message is an answer of which only the reasoning is known."""
    last = messages[-1] if messages else {}
    return bool(last.get("reasoning_content")) and not last["content"] and "tool_calls" not in last


def _assistant_message(messages: list[dict[str, object]]) -> dict[str, Any]:
    """Return the last message if it is the assistant's, or a new one after it."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _message(entry: Body, where: str, *, in_history: bool) -> dict[str, object]:
    role = read_value(OneOf(tuple(_ROLES)), f"{where}.role", entry.get("role"))
    content = text_content(entry.get("content"), f"{where}.content", in_history=in_history)
    return {"role": _ROLES[role], "content": content}


def _reasoning(entry: Body, where: str) -> str:
    """Return the text of a reasoning item that this server wrote; "" for another server's encrypted one."""
    parts = items(entry, "content", _MAX_PARTS)
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise UsageError(f"{where}.content must have parts with texts")
    return "".join(part["text"] for part in parts)


class ResponseForm:
    """One answer as a response."""

    keep_alive = COMMENT

    def __init__(self, call: Call, model: str) -> None:
        """model: the name of the one that answers."""
        self._call = call
        self._answer = AnswerParts()
        self._head = {"id": f"resp_{token_hex(12)}", "object": "response", "created_at": int(time.time())}
        self._model = model
        self._output: list[dict[str, Any]] = []  # items so far
        self._open = False  # the last item has not ended in the stream
        self._reports: list[object] = []  # of tokens whose text has not come yet
        self._number = 0  # of the next event
        self._extension: dict[str, object] = {}  # the `headrace` field of the response, or nothing

    def begin(self) -> bytes:
        """Return the first events."""
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def take(self, choice: int, event: Event) -> bytes:  # noqa: ARG002 - there is one
        """Return the events of an event."""
        if extra := prefix_of(self._call, event):
            self._extension = {"headrace": extra}
        if not isinstance(event, Delta | Done):
            return b""
        if isinstance(event, Delta):
            self._reports += chat_logprobs(token_reports(event))["content"]
        pieces = [self._part(part) for part in self._answer.take(event)]
        if isinstance(event, Done):
            pieces.append(self._close())
        return b"".join(pieces)

    def end(self) -> bytes:
        """Return the last event, with the whole response."""
        status = self._status()
        return self._event(f"response.{status}", response=self._response(status))

    def failed(self, error: ApiError) -> bytes:
        """Return the error as an event."""
        if error.status == 429:
            code = "rate_limit_exceeded"
        else:
            code = error.code or "server_error"
        failure = {**self._response("failed"), "error": {"code": code, "message": error.message}}
        return self._event("response.failed", response=failure)

    def document(self) -> dict[str, object]:
        """Return the response."""
        return self._response(self._status())

    def _status(self) -> str:
        end = self._answer.end
        if end is not None and end.reason == "length":
            return "incomplete"
        return "completed"

    def _response(self, status: str) -> dict[str, object]:
        """Return the response so far. status: in_progress, completed, incomplete or failed."""
        options = self._call.options
        end = self._answer.end
        incomplete = None
        if status == "incomplete":
            incomplete = {"reason": "max_output_tokens"}
        return {
            **self._head,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": incomplete,
            "max_output_tokens": options.max_tokens,
            "model": self._model,
            "output": list(self._output),
            "previous_response_id": None,
            "reasoning": {"effort": self._call.effort, "summary": None},
            "store": False,
            "temperature": options.temperature,
            "top_p": options.top_p,
            "truncation": "disabled",
            "usage": None if end is None else _usage(end),
            **self._call.echo,
            **self._extension,
        }

    def _part(self, part: Part) -> bytes:
        """Return the events of a part, in an item of its kind."""
        if isinstance(part, CallPart):
            return self._call_part(part)
        kind = "reasoning"
        if part.kind == "content":
            kind = "message"
        opened = b""
        if not self._open or self._output[-1]["type"] != kind:
            opened = self._close() + self._open_item(kind)
        written = self._output[-1]["content"][0]
        written["text"] += part.text
        reports = self._reports
        self._reports = []
        if kind == "message":
            written["logprobs"] += reports
        else:
            reports = []  # of thinking
        name = f"response.{written['type']}.delta"
        return opened + self._event(name, **self._item_fields(), delta=part.text, logprobs=reports)

    def _open_item(self, kind: str) -> bytes:
        """Begin an item, and return its first events. kind: message or reasoning."""
        number = token_hex(12)
        if kind == "message":
            item: dict[str, object] = {"id": f"msg_{number}", "type": kind, "status": "in_progress"}
            item |= {"role": "assistant", "content": []}
            part: dict[str, object] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item = {"id": f"rs_{number}", "type": kind, "status": "in_progress", "summary": [], "content": []}
            part = {"type": "reasoning_text", "text": ""}
        index = len(self._output)
        self._open = True
        added = self._event("response.output_item.added", output_index=index, item=item)
        self._output.append({**item, "content": [deepcopy(part)]})
        return added + self._event("response.content_part.added", **self._item_fields(), part=part)

    def _call_part(self, part: CallPart) -> bytes:
        """Return the events of a call, or of more of its arguments."""
        events = b""
        if part.first:
            events = self._close()
            item = self._call_item(part)
            events += self._event("response.output_item.added", output_index=len(self._output), item=item)
            if item["type"] == "custom_tool_call":
                item[_WRITTEN] = ""
            self._output.append(item)
            self._open = True
        item = self._output[-1]
        if item["type"] == "custom_tool_call":  # its text is known when its JSON is whole
            item[_WRITTEN] += part.arguments
            return events
        item["arguments"] += part.arguments
        return events + self._event(
            "response.function_call_arguments.delta", **self._item_fields(), delta=part.arguments
        )

    def _call_item(self, part: CallPart) -> dict[str, Any]:
        """Return the item of a call, without its arguments."""
        number = part.id.removeprefix("call_")
        if part.name in self._call.custom:
            item = {"id": f"ctc_{number}", "type": "custom_tool_call", "status": "in_progress"}
            return {**item, "call_id": part.id, "name": part.name, "input": ""}
        space, name = self._call.namespaces.get(part.name, ("", part.name))
        item = {"id": f"fc_{number}", "type": "function_call", "status": "in_progress"}
        item |= {"call_id": part.id, "name": name, "arguments": ""}
        if space:
            item["namespace"] = space
        return item

    def _close(self) -> bytes:
        """Return the events that end the open item."""
        if not self._open:
            return b""
        self._open = False
        item = self._output[-1]
        item["status"] = self._status()
        events = b""
        index = self._item_fields()
        if item["type"] == "custom_tool_call":
            item["input"] = custom_input(item.pop(_WRITTEN))
            events = self._event("response.custom_tool_call_input.delta", **index, delta=item["input"])
            events += self._event("response.custom_tool_call_input.done", **index, input=item["input"])
        elif item["type"] == "function_call":
            events = self._event("response.function_call_arguments.done", **index, arguments=item["arguments"])
        else:
            part = item["content"][0]
            reports = part.get("logprobs", [])
            events = self._event(f"response.{part['type']}.done", **index, text=part["text"], logprobs=reports)
            events += self._event("response.content_part.done", **index, part=part)
        return events + self._event("response.output_item.done", output_index=index["output_index"], item=item)

    def _item_fields(self) -> dict[str, object]:
        """Return the fields of an event that name the last item, and its only part of content if it has parts."""
        item = self._output[-1]
        fields = {"item_id": item["id"], "output_index": len(self._output) - 1}
        if "content" in item:
            fields["content_index"] = 0
        return fields

    def _event(self, name: str, **fields: object) -> bytes:
        document = {"type": name, "sequence_number": self._number, **fields}
        self._number += 1
        return named_event(name, document)


def _usage(end: Finished) -> dict[str, object]:
    usage = openai_usage([end])
    return {name: usage.pop(other) for other, name in _USAGE_NAMES.items()} | usage
