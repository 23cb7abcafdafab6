"""OpenAI's chat messages as those of a chat template: text contents, tool calls, and thinking that a client returns.

Server, batch and Python API read messages here. The result has the keys that Hugging Face's templates read: `role`,
`content`, `tool_calls`, `tool_call_id`, `name`, `reasoning_content`. `models/text/adapt_messages.py` then adapts it to
the template of a model.

Guards: tests/app/answer/test_messages.py.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.app.answer.fields import object_named
from headrace.app.answer.tools import custom_arguments
from headrace.runtime.config.value_types import OneOf, Text, read_value, shown
from headrace.runtime.errors import UsageError

# Bounds on the work of a request, far above what clients send.
MAX_MESSAGES = 10_000
MAX_CALLS = 1024  # in one message
# Roles of clients, and those that templates know.
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",  # of older clients, with the name of the function
}
# Parts of a content that are no text, by OpenAI's and Anthropic's types.
_OTHER_PARTS = {
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "file": "file",
    "input_file": "file",
    "document": "document",
    "input_audio": "audio",
    "audio": "audio",
    "video_url": "video",
}


def read_messages(given: object, *, strict: bool = False, where: str = "messages") -> list[dict[str, object]]:
    """Return a conversation. System messages at its beginning become one.

    strict: refuse a message of the user or the system without content, whose key may be misspelt.
    where: name of the list, for errors.
    Raises UsageError for a message that cannot be honoured wholly.
    """
    if not isinstance(given, list) or not given:
        raise UsageError(f"{where} must be a list with at least one message")
    if len(given) > MAX_MESSAGES:
        raise UsageError(f"{where} has {len(given)} entries, at most {MAX_MESSAGES} are allowed")
    newest = newest_user(given)  # images are refused in this message; words stand for earlier ones
    messages = [
        _message(value, f"{where}[{index}]", strict=strict, in_history=index != newest)
        for index, value in enumerate(given)
    ]
    return name_results(join_system(messages))


def join_system(messages: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return messages with the system messages at their beginning as one: most templates take only one."""
    num_system = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if num_system < 2:
        return messages
    joined = "\n\n".join(str(message["content"]) for message in messages[:num_system])
    return [{"role": "system", "content": joined}, *messages[num_system:]]


def name_results(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the names of the tools to results that answer a call: some templates need them."""
    names: dict[str | None, str] = {}
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        if message["role"] == "tool":
            name = names.get(message.get("tool_call_id"), message.get("name"))
            if name is not None:
                message["name"] = name
    return messages


def tool_call(identifier: str, name: str, arguments: str) -> dict[str, object]:
    """Return a call of a tool as a chat template takes it. arguments: JSON text."""
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


def not_shown(kind: object) -> str | None:
    """Return the words that stand for an image or a file in a text; None for a part of another type."""
    if not isinstance(kind, str) or kind not in _OTHER_PARTS:
        return None
    return f"[{_OTHER_PARTS[kind]}: not shown, this model reads text]"


def newest_user(given: Sequence[object]) -> int:
    """Return the index of the last user message in a client's list; -1 without any."""
    users = [index for index, value in enumerate(given) if isinstance(value, dict) and value.get("role") == "user"]
    return max(users, default=-1)


def text_content(value: object, where: str, *, in_history: bool = False) -> str:
    """Return a text, or the texts of a list of parts, a line each. Raises UsageError for any other content.

    in_history: words stand for images and files: an agent's session goes on after it has seen one.
    """
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if not isinstance(value, list):
        raise UsageError(f"{where} must be a text or a list of parts, not {shown(value)}")
    texts = []
    for index, part in enumerate(value):
        kind = None
        text = part
        if isinstance(part, dict):
            kind = part.get("type")
            text = part.get("text", part.get("refusal"))
        words = not_shown(kind)
        if in_history and words is not None:
            texts.append(words)
            continue
        if isinstance(part, dict) and kind not in ("text", "input_text", "output_text", "refusal"):
            raise UsageError(f"{where}[{index}] has a part of type {shown(kind)}, only text is supported")
        if not isinstance(text, str):
            raise UsageError(f"{where}[{index}] must be a text part, not {shown(part)}")
        texts.append(text)
    return "\n".join(texts)


def _message(value: object, where: str, *, strict: bool, in_history: bool) -> dict[str, object]:
    """Return one message. Its parameters are those of `read_messages`, and `in_history` of `text_content`."""
    given = object_named(where, value)
    role = _ROLES[read_value(OneOf(tuple(_ROLES)), f"{where}.role", given.get("role"))]
    if strict and role in ("system", "user") and given.get("content") is None:
        raise UsageError(f"{where} needs content")
    if given.get("audio"):
        raise UsageError(f"{where}.audio is not supported")
    content = text_content(given.get("content"), f"{where}.content", in_history=in_history)
    message: dict[str, object] = {"role": role, "content": content}
    if role == "tool":
        return message | {key: _text_of(given, key, where) for key in ("tool_call_id", "name") if given.get(key)}
    calls = given.get("tool_calls")
    if not calls and given.get("function_call"):  # of older clients; its result has no identifier either
        calls = [{"function": given["function_call"]}]
    if role == "assistant" and calls:
        message["tool_calls"] = _calls(calls, f"{where}.tool_calls")
    reasoning = given.get("reasoning_content") or given.get("reasoning")
    if role == "assistant" and isinstance(reasoning, str) and reasoning:
        message["reasoning_content"] = reasoning
    return message


def _calls(value: object, where: str) -> list[dict[str, object]]:
    """Return the tool calls of a message of the assistant. where: path of the list, for errors."""
    if not isinstance(value, list) or len(value) > MAX_CALLS:
        raise UsageError(f"{where} must be a list of at most {MAX_CALLS} calls")
    calls = []
    for index, call in enumerate(value):
        at = f"{where}[{index}]"
        function = _function_of(call)
        if function is None:
            raise UsageError(f"{at} must be an object with a function, not {shown(call)}")
        name = _text_of(function, "name", f"{at}.function")
        identifier = f"call_{index}"
        if call.get("id"):
            identifier = _text_of(call, "id", at)
        calls.append(tool_call(identifier, name, _arguments(function.get("arguments"), f"{at}.function")))
    return calls


def _function_of(call: object) -> dict[str, object] | None:
    """Return the function of a call, with its name and arguments; None for anything else.

    A custom tool takes one text: to the model it is a function with one parameter (`app.answer.tools`).
    """
    if not isinstance(call, dict):
        return None
    function = call.get("function")
    custom = call.get("custom")
    if function is None and isinstance(custom, dict):
        return {"name": custom.get("name"), "arguments": custom_arguments(custom.get("input"))}
    if not isinstance(function, dict):
        return None
    return function


def _arguments(value: object, where: str) -> str:
    """Return arguments as JSON text: clients send them as text, whole or cut, as an object, or not at all."""
    if value is None:
        return ""
    if isinstance(value, Mapping):
        return json.dumps(value, ensure_ascii=False)
    if not isinstance(value, str):
        raise UsageError(f"{where}.arguments must be a text or an object, not {shown(value)}")
    return value


def _text_of(value: Mapping[str, object], name: str, where: str) -> str:
    return read_value(Text(), f"{where}.{name}", value.get(name))
