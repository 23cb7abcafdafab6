"""OpenAI's `tools` and `tool_choice` as the tools of an answer."""

from collections.abc import Mapping

from headrace.models.text.tools.use import ToolUse
from headrace.runtime.config.value_types import shown
from headrace.runtime.errors import UsageError

_CHOICES = ("auto", "none", "required")


def read_tools(tools: object, choice: object = None, parallel: object = None) -> ToolUse | None:
    """Return the tools of a request; None without any. Raises UsageError that names the parameter.

    choice: `tool_choice`, "auto" by default. parallel: `parallel_tool_calls`, true by default.
    """
    if tools is None or tools == []:
        if choice not in (None, "auto", "none"):
            raise UsageError("tool_choice needs tools")
        return None
    if not isinstance(tools, list | tuple):
        raise UsageError(f"tools must be a list, not {shown(tools)}")
    if parallel is not None and not isinstance(parallel, bool):
        raise UsageError(f"parallel_tool_calls must be true or false, not {shown(parallel)}")
    try:
        return ToolUse(tools, _choice(choice), parallel is not False)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _choice(choice: object) -> str:
    match choice:
        case None:
            return "auto"
        case str() if choice in _CHOICES:
            return choice
        case "any" | {"type": "any" | "required"}:
            return "required"
        case {"type": "auto" | "none" as kind}:
            return str(kind)
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return name
        case Mapping() | str():
            pass
    raise UsageError(f"tool_choice must be auto, none, required or a function, not {shown(choice)}")
