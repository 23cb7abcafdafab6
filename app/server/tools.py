"""Tools of a request: the definitions and choices of every client's form, as those of OpenAI's chat API.

Tools that a service runs itself (web search, code interpreters) are ignored: a client offers them, and nothing here
calls them.
"""

from typing import Any

from headrace.app.answer.tools import read_tools
from headrace.app.answer.value_types import shown
from headrace.app.server.errors import refused
from headrace.app.server.fields import Body, items, mapping
from headrace.models.text.tools.use import ToolUse

MAX_TOOLS = 512


def chat_tools(body: Body) -> ToolUse | None:
    """Return the tools of a chat completion. Raises UsageError and ApiError."""
    tools, choice = _allowed(items(body, "tools", MAX_TOOLS), body.get("tool_choice"))
    return read_tools(tools, choice, body.get("parallel_tool_calls"))


def response_tools(body: Body) -> ToolUse | None:
    """Return the functions among the tools of a response."""
    tools = [_nested(tool) for tool in items(body, "tools", MAX_TOOLS) if _kind(tool) == "function"]
    tools, choice = _allowed(tools, body.get("tool_choice"))
    return read_tools(tools, choice, body.get("parallel_tool_calls"))


def message_tools(body: Body) -> ToolUse | None:
    """Return the tools of Anthropic's form that the client runs."""
    tools = [_of_schema(tool) for tool in items(body, "tools", MAX_TOOLS) if _kind(tool) in (None, "custom")]
    given = mapping(body, "tool_choice")
    choice: Any = {"any": "required", "none": "none"}.get(str(given.get("type")), "auto")
    if given.get("type") == "tool":
        choice = {"type": "function", "function": {"name": given.get("name")}}
    elif given.get("type", "auto") not in ("auto", "any", "none"):
        raise refused(f"tool_choice.type must be auto, any, tool or none, not {shown(given['type'])}", "tool_choice")
    return read_tools(tools, choice, not given.get("disable_parallel_tool_use"))


def _allowed(tools: list[Any], choice: Any) -> tuple[list[Any], Any]:
    """Return the tools that a `tool_choice` of type allowed_tools leaves, and its mode; else both as they are.

    Both of OpenAI's forms: the list stands within the choice, or in an object of its own.
    """
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return tools, choice
    given = mapping(choice, "allowed_tools") if "allowed_tools" in choice else choice
    wanted = [tool for tool in items(given, "tools", MAX_TOOLS) if _kind(tool) in (None, "function")]
    names = {str(tool.get("name") or mapping(tool, "function").get("name")) for tool in wanted}
    kept = (tool for tool in tools if _kind(tool) in (None, "function"))
    left = [tool for tool in kept if str(mapping(tool, "function").get("name")) in names]
    if given.get("mode") not in ("auto", "required") or len(left) < len(names):
        raise refused("tool_choice: allowed_tools needs a mode, auto or required, and names of tools", "tool_choice")
    return left, given["mode"]


def _kind(tool: object) -> object:
    if not isinstance(tool, dict):
        raise refused(f"tools must have objects, not {shown(tool)}", "tools")
    return tool.get("type")


def _nested(tool: Body) -> dict[str, Any]:
    fields = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in fields if tool.get(name) is not None}}


def _of_schema(tool: Body) -> dict[str, Any]:
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    return {"type": "function", "function": function | {key: tool[key] for key in ("description",) if tool.get(key)}}
