"""Messages with tool calls and results, as chat templates take them; as plain text for templates without tools."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.models.text.tools.use import ToolUse

_OFFER = (
    "You can call functions. To call one, answer with a JSON object alone: "
    '{"name": the function\'s name, "arguments": an object of its parameters}. The functions are:'
)


def with_arguments(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages whose calls have their arguments as objects, which templates write as they need."""
    return [
        {**message, "tool_calls": [_with_object(call) for call in calls]}
        if isinstance(calls := message.get("tool_calls"), list)
        else message
        for message in messages
    ]


def as_text(messages: Sequence[Mapping[str, Any]], tools: ToolUse | None) -> list[Mapping[str, Any]]:
    """Return messages without calls and results of tools, which become text, and with the offer of `tools`."""
    plain: list[Mapping[str, Any]] = []
    for message in with_arguments(messages):
        calls = message.get("tool_calls")
        if message.get("role") == "tool":
            name = message.get("name") or message.get("tool_call_id") or "the function"
            plain.append({"role": "user", "content": f"Result of {name}:\n{message.get('content', '')}"})
        elif isinstance(calls, list):
            functions = [call.get("function", call) for call in calls if isinstance(call, Mapping)]
            written = [{"name": each.get("name"), "arguments": each.get("arguments")} for each in functions]
            lines = [message.get("content"), *(json.dumps(each, ensure_ascii=False) for each in written)]
            plain.append({"role": message.get("role"), "content": "\n".join(str(line) for line in lines if line)})
        else:
            plain.append(message)
    if tools is None:
        return plain
    functions = [definition["function"] for definition in tools.definitions]
    offer = "\n".join([_OFFER, *(json.dumps(function, ensure_ascii=False) for function in functions)])
    if plain and plain[0].get("role") == "system" and isinstance(plain[0].get("content"), str):
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{offer}"}, *plain[1:]]
    return [{"role": "system", "content": offer}, *plain]


def _with_object(call: object) -> object:
    """Return a call with its arguments as an object, if they are JSON text of one."""
    if not isinstance(call, Mapping):
        return call
    function = call.get("function")
    inner: Mapping[str, Any] = function if isinstance(function, Mapping) else call
    arguments = inner.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        value = json.loads(arguments or "{}")
    except ValueError:
        return call
    changed = {**inner, "arguments": value if isinstance(value, Mapping) else arguments}
    return {**call, "function": changed} if isinstance(function, Mapping) else changed
