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
    return read_tools(items(body, "tools", MAX_TOOLS), body.get("tool_choice"), body.get("parallel_tool_calls"))


def response_tools(body: Body) -> ToolUse | None:
    """Return the functions among the tools of a response."""
    tools = [_nested(tool) for tool in items(body, "tools", MAX_TOOLS) if _kind(tool) == "function"]
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    return read_tools(tools, choice if tools else None, body.get("parallel_tool_calls"))


def message_tools(body: Body) -> ToolUse | None:
    """Return the tools of Anthropic's form that the client runs."""
    tools = [_of_schema(tool) for tool in items(body, "tools", MAX_TOOLS) if _kind(tool) in (None, "custom")]
    given = mapping(body, "tool_choice")
    choice: Any = {"any": "required", "none": "none"}.get(str(given.get("type")), "auto")
    if given.get("type") == "tool":
        choice = {"type": "function", "function": {"name": given.get("name")}}
    elif given.get("type", "auto") not in ("auto", "any", "none"):
        raise refused(f"tool_choice.type must be auto, any, tool or none, not {shown(given['type'])}", "tool_choice")
    return read_tools(tools, choice if tools else None, not given.get("disable_parallel_tool_use"))


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
