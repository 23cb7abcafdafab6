"""OpenAI's chat messages as those of a chat template: text contents, tool calls, and thinking that a client returns."""

from typing import Any

from headrace.app.answer.value_types import shown
from headrace.app.server.errors import refused
from headrace.app.server.fields import MAX_MESSAGES, Body, items

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def read_messages(body: Body) -> list[dict[str, Any]]:
    """Return the conversation of a body. System messages at its beginning become one.

    Raises ApiError for a message that cannot be honoured wholly.
    """
    given = items(body, "messages", MAX_MESSAGES)
    if not given:
        raise refused("messages must be a list with at least one message", "messages")
    messages = [_message(value, f"messages[{place}]") for place, value in enumerate(given)]
    return join_system(messages)


def join_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with the system messages at their beginning as one: most templates take only one."""
    first = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if first < 2:
        return messages
    joined = "\n\n".join(str(message["content"]) for message in messages[:first])
    return [{"role": "system", "content": joined}, *messages[first:]]


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
    for name in ("tool_calls", "function_call", "audio"):
        if value.get(name):
            raise refused(f"{where}.{name} is not supported", where)
    message: dict[str, Any] = {"role": _ROLES[role], "content": text_content(value.get("content"), f"{where}.content")}
    reasoning = value.get("reasoning_content", value.get("reasoning"))
    if role == "assistant" and isinstance(reasoning, str) and reasoning:
        message["reasoning_content"] = reasoning
    return message
