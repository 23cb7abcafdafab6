"""OpenAI's chat messages as those of a chat template: text contents, tool calls, and thinking that a client returns."""

from collections.abc import Mapping
from typing import Any

from headrace.app.answer.value_types import shown
from headrace.runtime.errors import UsageError

MAX_MESSAGES = 10_000
MAX_CALLS = 1024  # in one message
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_KEYS = {"assistant": {"tool_calls", "reasoning_content"}, "tool": {"tool_call_id", "name"}}  # beside role and content


def read_messages(given: object, *, strict: bool = False) -> list[dict[str, Any]]:
    """Return a conversation. System messages at its beginning become one.

    strict: refuse unknown keys of a message, and one without content. Raises UsageError for a message that cannot be
    honoured wholly.
    """
    if not isinstance(given, list) or not given:
        raise UsageError("messages must be a list with at least one message")
    if len(given) > MAX_MESSAGES:
        raise UsageError(f"messages has {len(given)} entries, at most {MAX_MESSAGES} are allowed")
    messages = [_message(value, f"messages[{place}]", strict=strict) for place, value in enumerate(given)]
    return name_results(join_system(messages))


def join_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with the system messages at their beginning as one: most templates take only one."""
    first = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if first < 2:
        return messages
    joined = "\n\n".join(str(message["content"]) for message in messages[:first])
    return [{"role": "system", "content": joined}, *messages[first:]]


def name_results(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the names of the tools to results: some templates need them. Raises UsageError for one without a call."""
    names: dict[str, str] = {}
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        if message["role"] == "tool":
            identifier = message["tool_call_id"]
            if identifier not in names:
                raise UsageError(f"messages: no call of a tool has the id {shown(identifier)}")
            message["name"] = names[identifier]
    return messages


def tool_call(identifier: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a call of a tool as a chat template takes it. arguments: JSON text."""
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


def text_content(value: object, where: str) -> str:
    """Return a text, or the texts of a list of parts, a line each. Raises UsageError for any other content."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if not isinstance(value, list):
        raise UsageError(f"{where} must be a text or a list of parts, not {shown(value)}")
    texts = []
    for place, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        found = part.get("text", part.get("refusal")) if isinstance(part, dict) else part
        if isinstance(part, dict) and kind not in ("text", "input_text", "output_text", "refusal"):
            raise UsageError(f"{where}[{place}] has a part of type {shown(kind)}, only text is supported")
        if not isinstance(found, str):
            raise UsageError(f"{where}[{place}] must be a text part, not {shown(part)}")
        texts.append(found)
    return "\n".join(texts)


def _message(value: Any, where: str, *, strict: bool) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{where} must be an object, not {shown(value)}")
    role = value.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise UsageError(f"{where}.role must be one of {', '.join(_ROLES)}, not {shown(role)}")
    calls = value.get("tool_calls") if role == "assistant" else None
    if strict:
        unknown = next((key for key in value if key not in {"role", "content"} | _KEYS.get(role, set())), None)
        if unknown is not None:
            raise UsageError(f"{where} has the unknown key {shown(unknown)}")
        if value.get("content") is None and not calls:
            raise UsageError(f"{where} needs content")
    for name in ("function_call", "audio"):
        if value.get(name):
            raise UsageError(f"{where}.{name} is not supported")
    message: dict[str, Any] = {"role": _ROLES[role], "content": text_content(value.get("content"), f"{where}.content")}
    if role == "tool":
        return message | {"tool_call_id": _text_of(value, "tool_call_id", where)}
    if calls:
        message["tool_calls"] = _calls(calls, f"{where}.tool_calls")
    reasoning = value.get("reasoning_content", value.get("reasoning"))
    if role == "assistant" and isinstance(reasoning, str) and reasoning:
        message["reasoning_content"] = reasoning
    return message


def _calls(value: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or len(value) > MAX_CALLS:
        raise UsageError(f"{where} must be a list of at most {MAX_CALLS} calls")
    found = []
    for place, call in enumerate(value):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise UsageError(f"{where}[{place}] must be an object with a function, not {shown(call)}")
        name, arguments = (_text_of(function, key, f"{where}[{place}].function") for key in ("name", "arguments"))
        found.append(tool_call(_text_of(call, "id", f"{where}[{place}]"), name, arguments))
    return found


def _text_of(value: Mapping[str, Any], name: str, where: str) -> str:
    if not isinstance(found := value.get(name), str):
        raise UsageError(f"{where}.{name} must be a text, not {shown(found)}")
    return found
