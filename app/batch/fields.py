"""Keys and values of a batch line: options, texts, flags and messages. Unknown keys and other types are refused."""

from collections.abc import Mapping

from headrace.app.answer.messages import read_messages
from headrace.app.answer.options import OPTIONS, AnswerOptions
from headrace.app.answer.tools import read_tools
from headrace.models.text.tools.use import ToolUse
from headrace.runtime.config.value_types import Text, read_value, shown
from headrace.runtime.errors import UsageError

TOOLS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})
Conversation = list[dict[str, object]]


_ALIASES = {"max_completion_tokens": "max_tokens"}


def read_options(given: Mapping[str, object]) -> AnswerOptions:
    """Return the answer options among `given`; null is not set. Raises UsageError."""
    known = OPTIONS.keys() | _ALIASES.keys()
    return AnswerOptions.read({key: value for key, value in given.items() if key in known}, aliases=_ALIASES)


def line_tools(given: Mapping[str, object]) -> ToolUse | None:
    """Return the tools of a line; None without any. Raises UsageError."""
    return read_tools(given.get("tools"), given.get("tool_choice"), given.get("parallel_tool_calls"))


def refuse_unknown(given: Mapping[str, object], known: frozenset[str], where: str = "") -> None:
    """Raises UsageError that names the first unknown key."""
    for key in given:
        if key not in known:
            raise UsageError(f"unknown key {shown(key)}{where}")


def prompt_text(value: object) -> str:
    """Return a prompt. Raises UsageError for anything but a text with more than spaces."""
    prompt = read_value(Text(), "prompt", value)
    if not prompt.strip():
        raise UsageError("prompt must not be empty")
    return prompt


def conversation(value: object, system: str) -> Conversation:
    """Return a list of messages, with `system` before them unless they begin with a system message.

    Raises UsageError for anything else, and for a message with keys or content that would be left out.
    """
    messages = read_messages(value, strict=True)
    return messages if messages[0]["role"] == "system" else [*system_message(system), *messages]


def system_message(system: str) -> Conversation:
    """Return the system message as the beginning of a conversation; nothing for an empty one."""
    return [{"role": "system", "content": system}] if system else []
