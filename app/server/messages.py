"""OpenAI's chat messages as those of a chat template: text contents, tool calls, and thinking that a client returns."""

from typing import Any

from headrace.app.answer.value_types import shown
from headrace.app.server.errors import refused
from headrace.app.server.fields import MAX_MESSAGES, Body, items, mapping

MAX_CALLS = 1024  # in one message
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def read_messages(body: Body) -> list[dict[str, Any]]:
    """Return the conversation of a body. System messages at its beginning become one.

    Raises ApiError for a message that cannot be honoured wholly.
    """
    given = items(body, "messages", MAX_MESSAGES)
    if not given:
        raise refused("messages must be a list with at least one message", "messages")
    messages = [_message(value, f"messages[{place}]") for place, value in enumerate(given)]
    return name_results(join_system(messages))


def join_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with the system messages at their beginning as one: most templates take only one."""
    first = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if first < 2:
        return messages
    joined = "\n\n".join(str(message["content"]) for message in messages[:first])
    return [{"role": "system", "content": joined}, *messages[first:]]


def name_results(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the names of the tools to results: some templates need them. Raises ApiError for a result without a call."""
    names: dict[str, str] = {}
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        if message["role"] == "tool":
            identifier = message["tool_call_id"]
            if identifier not in names:
                raise refused(f"no call of a tool has the id {shown(identifier)}", "messages")
            message["name"] = names[identifier]
    return messages


def tool_call(identifier: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a call of a tool as a chat template takes it. arguments: JSON text."""
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


def text_content(value: object, where: str) -> str:
    """Return a text, or the texts of a list of parts, a line each. Raises ApiError for any other content."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if not isinstance(value, list):
        raise refused(f"{where} must be a text or a list of parts, not {shown(value)}", where)
    texts = []
    for place, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        found = part.get("text", part.get("refusal")) if isinstance(part, dict) else part
        if isinstance(part, dict) and kind not in ("text", "input_text", "output_text", "refusal"):
            raise refused(f"{where}[{place}]: parts of type {shown(kind)} are not supported, only text", where)
        if not isinstance(found, str):
            raise refused(f"{where}[{place}] must be a text part, not {shown(part)}", where)
        texts.append(found)
    return "\n".join(texts)


def _message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise refused(f"{where} must be an object, not {shown(value)}", where)
    role = value.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise refused(f"{where}.role must be one of {', '.join(_ROLES)}, not {shown(role)}", where)
    for name in ("function_call", "audio"):
        if value.get(name):
            raise refused(f"{where}.{name} is not supported", where)
    message: dict[str, Any] = {"role": _ROLES[role], "content": text_content(value.get("content"), f"{where}.content")}
    if role == "tool":
        return message | {"tool_call_id": _text_of(value, "tool_call_id", where)}
    if role == "assistant" and value.get("tool_calls"):
        calls = [
            _call(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(items(value, "tool_calls", MAX_CALLS))
        ]
        message["tool_calls"] = calls
    reasoning = value.get("reasoning_content", value.get("reasoning"))
    if role == "assistant" and isinstance(reasoning, str) and reasoning:
        message["reasoning_content"] = reasoning
    return message


def _call(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise refused(f"{where} must be an object, not {shown(value)}", "messages")
    function = mapping(value, "function")
    return tool_call(
        *(
            _text_of(*place)
            for place in (
                (value, "id", where),
                (function, "name", f"{where}.function"),
                (function, "arguments", f"{where}.function"),
            )
        )
    )


def _text_of(value: Body, name: str, where: str) -> str:
    if not isinstance(found := value.get(name), str):
        raise refused(f"{where}.{name} must be a text, not {shown(found)}", "messages")
    return found
