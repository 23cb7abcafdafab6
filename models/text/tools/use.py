"""The tools of a request, and the choice between them.

The server and the CLI make a `ToolUse` of each request; template, form and grammar read it.

Guards: tests/app/answer/test_tools.py and tests/models/text/tools/test_one_form.py.
"""

import re
from collections.abc import Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import force_setattr, replace

from headrace.models.text.tools.call import Tool

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")  # the forms read names of these characters alone
MAX_TOOLS = 256  # each costs time in the template and in the grammar


class ToolUse(Struct, frozen=True):
    """The tools that an answer may use.

    definitions: as the chat template takes them, OpenAI's form.
    choice: "auto", "none", "required" or a tool's name.
    parallel: an answer may have several calls.
    tools: by name, read from the definitions. Only `with_tools` and pickles pass them.
    """

    definitions: Sequence[Mapping[str, object]]
    choice: str = "auto"
    parallel: bool = True
    tools: Mapping[str, Tool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ValueError for definitions that are malformed, and a choice of an unknown tool."""
        if len(self.definitions) > MAX_TOOLS:
            raise ValueError(f"tools: at most {MAX_TOOLS}")
        force_setattr(self, "definitions", [_nested(definition) for definition in self.definitions])
        if not self.tools:
            tools = [_tool(definition) for definition in self.definitions]
            force_setattr(self, "tools", {tool.name: tool for tool in tools})
            if len(self.tools) < len(tools):
                raise ValueError("tools: a name is there twice")
        if self.choice not in ("auto", "none", "required") and self.choice not in self.tools:
            raise ValueError(f"tool_choice: no tool {self.choice!r:.80}")

    @property
    def is_forced(self) -> bool:
        """True if the answer has to be a call."""
        return self.choice not in ("auto", "none")

    def with_tools(self, tools: Mapping[str, Tool]) -> "ToolUse":
        """Return the same use of changed tools."""
        return replace(self, tools=tools)

    @property
    def callable(self) -> list[Tool]:
        """The tools that may be called."""
        if self.choice == "none":
            return []
        named = self.tools.get(self.choice)
        return list(self.tools.values()) if named is None else [named]


def _nested(definition: object) -> object:
    """Return a definition in the form of chat completions; that of the Responses API has its fields at the top."""
    if not isinstance(definition, Mapping) or "function" in definition or "name" not in definition:
        return definition
    function = {key: value for key, value in definition.items() if key != "type"}
    return {"type": definition.get("type", "function"), "function": function}


def _tool(definition: object) -> Tool:
    """Return the tool of a definition. Raises ValueError for a malformed one."""
    if not isinstance(definition, Mapping) or definition.get("type", "function") != "function":
        raise ValueError("tools: each must be an object of type function")
    function = definition.get("function")
    if not isinstance(function, Mapping):
        raise ValueError("tools: each needs a function")
    name = function.get("name")
    parameters = function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError("tools: a function's name must have 1 to 128 letters, digits and any of _ . : / -")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise ValueError(f"tools: the parameters of {name} must be a JSON schema")
    return Tool(name, parameters or {}, strict=function.get("strict") is True)
