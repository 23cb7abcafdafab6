"""OpenAI's `tools` and `tool_choice` as the tools of an answer.

Tools that a service runs itself (web search, code interpreters) are ignored: a client offers them, and nothing here
calls them. A custom tool, which takes one text, becomes a function with one parameter. A namespace's functions keep
their parameters, and get names with that of the namespace (`name_in`).

Guards: tests/app/answer/test_tools.py.
"""

import json
from collections.abc import Mapping
from typing import Any

from headrace.app.answer.fields import Body, items, mapping
from headrace.models.checkpoint.side_file import without_nulls
from headrace.models.text.tools.use import ToolUse
from headrace.runtime.config.value_types import Flag, read_value, shown
from headrace.runtime.errors import UsageError

# In the list of a request, and in that of a namespace. Of those that the model may call, `ToolUse` takes 256.
MAX_TOOLS = 512
_CHOICES = ("auto", "none", "required")
_FLAT_FIELDS = frozenset({"name", "description", "parameters", "strict"})  # of a function in the Responses API
_INPUT = "input"  # the parameter of a custom tool


def tool_fields(body: Body) -> dict[str, Any]:
    """Return the fields of a `Call` about tools: `tools`, `custom` and `namespaces`. Raises UsageError.

    Each tool becomes a function in the form of chat completions, with a name of its own for the model.
    """
    tools: list[dict[str, Any]] = []
    custom = set[str]()
    namespaces: dict[str, tuple[str, str]] = {}
    for tool in items(body, "tools", MAX_TOOLS):
        match tool_kind(tool):  # other types are a service's own tools
            case "function" | None:
                tools.append(_nested(tool))
            case "custom":
                tools.append(_function_of_custom(tool))
                custom.add(str(_custom(tool).get("name")))
            case "namespace":
                namespace = str(tool.get("name"))
                for function in items(tool, "tools", MAX_TOOLS):
                    tool_kind(function)  # raises for one that is no object
                    nested = _nested(function)
                    name = str(nested["function"].get("name"))
                    whole_name = name_in(namespace, name)
                    nested["function"]["name"] = whole_name
                    namespaces[whole_name] = (namespace, name)
                    tools.append(nested)

    tools, choice = _allowed(tools, body.get("tool_choice"))
    if isinstance(choice, dict) and choice.get("type") == "custom":
        choice = {"type": "function", "name": _custom(choice).get("name")}
    use = read_tools(tools, choice, body.get("parallel_tool_calls"))
    return {"tools": use, "custom": frozenset(custom), "namespaces": namespaces}


def read_tools(tools: object, choice: object = None, parallel: object = None) -> ToolUse | None:
    """Return the tools of a request; None without any. Raises UsageError that names the parameter.

    tools: definitions, as in OpenAI's chat API.
    choice: `tool_choice`, "auto" by default.
    parallel: `parallel_tool_calls`, true by default.
    """
    if tools is None or tools == []:
        if choice not in (None, "auto", "none"):
            raise UsageError("tool_choice needs tools")
        return None
    if not isinstance(tools, list | tuple):
        raise UsageError(f"tools must be a list, not {shown(tools)}")
    is_parallel = parallel is None or read_value(Flag(), "parallel_tool_calls", parallel)
    try:
        return ToolUse(tools, _choice(choice), is_parallel)
    except ValueError as error:
        raise UsageError(str(error)) from None


def name_in(namespace: str, name: str) -> str:
    """Return the name under which the model sees a function of a namespace."""
    return f"{namespace}__{name}"


def custom_arguments(text: object) -> str:
    """Return the text that a custom tool takes as JSON arguments of a function, for a call in a history.

    text: as the client sent it.
    """
    return json.dumps({_INPUT: text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """Return the text of a call of a custom tool; the arguments themselves if a limit cut them."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    if not isinstance(value, dict):
        return arguments
    return str(value.get(_INPUT, ""))


def _choice(choice: object) -> str:
    """Return auto, none, required or the name of a function. Anthropic's form has types for the first three."""
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


def _allowed(tools: list[Any], choice: object) -> tuple[list[Any], object]:
    """Return the tools that a `tool_choice` of type allowed_tools leaves, and its mode; else both as they are.

    Both of OpenAI's forms: the list stands within the choice, or in an object of its own.
    """
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return tools, choice
    allowed: Body = choice
    if "allowed_tools" in choice:
        allowed = mapping(choice, "allowed_tools")
    names = set[str]()
    for tool in items(allowed, "tools", MAX_TOOLS):
        if tool_kind(tool) in (None, "function"):
            names.add(str(tool.get("name") or mapping(tool, "function").get("name")))
    functions = [tool for tool in tools if tool_kind(tool) in (None, "function")]
    remaining = [tool for tool in functions if str(mapping(tool, "function").get("name")) in names]
    if allowed.get("mode") not in ("auto", "required") or len(remaining) < len(names):
        raise UsageError("tool_choice: allowed_tools needs a mode, auto or required, and names of tools")
    return remaining, allowed["mode"]


def tool_kind(tool: object) -> object:
    """Return the type of a tool. Raises UsageError for one that is no object."""
    if not isinstance(tool, dict):
        raise UsageError(f"tools must have objects, not {shown(tool)}")
    return tool.get("type")


def _nested(tool: Body) -> dict[str, Any]:
    """Return a function in the form of chat completions; that of responses has its fields at the top.

    Keys keep the client's order: templates write definitions as JSON.
    """
    if "function" in tool:
        nested = {key: value for key, value in tool.items() if key in ("type", "function")}
        nested["function"] = without_nulls(mapping(tool, "function"))
        nested["type"] = "function"
        return nested
    function = {key: value for key, value in without_nulls(tool).items() if key in _FLAT_FIELDS}
    return {"type": "function", "function": function}


def _custom(tool: Body) -> Body:
    """Return the fields of a custom tool: within `custom` in chat completions, at the top in responses."""
    if "custom" in tool:
        return mapping(tool, "custom")
    return tool


def _function_of_custom(tool: Body) -> dict[str, object]:
    """Return a tool that takes a text as a function with one parameter. A grammar of its text is described only."""
    custom = _custom(tool)
    descriptions = [str(custom.get("description") or "")]
    grammar = mapping(custom, "format").get("definition")
    if isinstance(grammar, str):
        descriptions.append(f"The input follows this grammar:\n{grammar}")
    function = {
        "name": custom.get("name"),
        "description": "\n\n".join(filter(None, descriptions)),
        "parameters": {"type": "object", "properties": {_INPUT: {"type": "string"}}, "required": [_INPUT]},
    }
    return {"type": "function", "function": function}
