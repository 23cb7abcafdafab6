"""Keys and values of a batch line: unknown keys refused, prompts and system messages."""

from collections.abc import Mapping, Sequence

from headrace.runtime.config.value_types import shown
from headrace.runtime.errors import UsageError

Conversation = Sequence[Mapping[str, object]]


def refuse_unknown(given: Mapping[str, object], known: frozenset[str], where: str = "") -> None:
    """Raises UsageError that names the first unknown key."""
    for key in given:
        if key not in known:
            raise UsageError(f"unknown key {shown(key)}{where}")


def with_system(messages: Conversation, system: str) -> Conversation:
    """Return a conversation with `system` before it, unless that is empty or it begins with a system message."""
    if not system or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]
