"""The conversation of a line, checked: every message has a role and a text, and nothing that would be left out."""

from typing import Any

from headrace.app.batch.options import refuse_unknown, shown, text
from headrace.runtime.errors import UsageError

ROLES = frozenset({"system", "user", "assistant"})


def conversation(value: Any, system: str) -> list[dict[str, str]]:
    """A list of messages; `system` goes before them where they begin with no such message.

    Raises UsageError for what is none, and for what would be left out of it.
    """
    if not isinstance(value, list) or not value:
        raise UsageError("messages must be a list with at least one message")
    messages = [_message(one, f" in message {position}") for position, one in enumerate(value, 1)]
    return [*opened_by(system), *messages] if messages[0]["role"] != "system" else messages


def opened_by(system: str) -> list[dict[str, str]]:
    """What a conversation begins with: the system message, or nothing."""
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
    """A text; or a list of texts as OpenAI's clients write it, joined by line ends."""
    if not isinstance(value, list):
        return text(f"content{where}", value)
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or part.keys() != {"type", "text"}:
            raise UsageError(f"content can only have parts of text, not {shown(part)}{where}")
    return "\n".join(text(f"content{where}", part["text"]) for part in value)
