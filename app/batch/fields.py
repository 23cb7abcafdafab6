"""Keys and values of a batch line: options, texts, flags and messages. Unknown keys and other types are refused."""

from collections.abc import Mapping
from typing import Any

from headrace.app.answer.options import OPTIONS, AnswerOptions
from headrace.app.answer.value_types import Flag, Text, read_value, shown
from headrace.runtime.errors import UsageError

ROLES = frozenset({"system", "user", "assistant"})

Conversation = list[dict[str, str]]


def read_options(given: Mapping[str, Any]) -> AnswerOptions:
    """Return the answer options among `given`; null is not set. Raises UsageError."""
    return AnswerOptions(**{key: value for key, value in given.items() if key in OPTIONS})


def refuse_unknown(given: Mapping[str, Any], known: frozenset[str], where: str = "") -> None:
    """Raises UsageError that names the first unknown key."""
    for key in given:
        if key not in known:
            raise UsageError(f"unknown key {shown(key)}{where}")


def text(key: str, value: Any) -> str:
    """Return a text. Raises UsageError for anything else."""
    found: str = read_value(Text(), key, value)
    return found


def prompt_text(value: Any) -> str:
    """Return a prompt. Raises UsageError for anything but a text with more than spaces."""
    prompt = text("prompt", value)
    if not prompt.strip():
        raise UsageError("prompt must not be empty")
    return prompt


def flag(key: str, value: Any) -> bool:
    """Return a flag. Raises UsageError for anything else."""
    found: bool = read_value(Flag(), key, value)
    return found


def conversation(value: Any, system: str) -> Conversation:
    """Return a list of messages, with `system` before them unless they begin with a system message.

    Raises UsageError for anything else, and for a message with keys or content that would be left out.
    """
    if not isinstance(value, list) or not value:
        raise UsageError("messages must be a list with at least one message")
    messages = [_message(one, f" in message {position}") for position, one in enumerate(value, 1)]
    return messages if messages[0]["role"] == "system" else [*system_message(system), *messages]


def system_message(system: str) -> Conversation:
    """Return the system message as the beginning of a conversation; nothing for an empty one."""
    return [{"role": "system", "content": system}] if system else []


def _message(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise UsageError(f"a message must be an object, not {shown(value)}{where}")
    refuse_unknown(value, frozenset({"role", "content"}), where)
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise UsageError(f"role must be system, user or assistant, not {shown(role)}{where}")
    return {"role": role, "content": _content(value.get("content"), where)}


def _content(value: Any, where: str) -> str:
    """Return a text, or OpenAI's list of text parts joined by line ends."""
    if not isinstance(value, list):
        return text(f"content{where}", value)
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or part.keys() != {"type", "text"}:
            raise UsageError(f"content can only have parts of text, not {shown(part)}{where}")
    return "\n".join(text(f"content{where}", part["text"]) for part in value)
