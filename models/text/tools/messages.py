"""The offer of tools as a text, for chat templates that write none."""

import json
from collections.abc import Mapping, Sequence

from headrace.models.text.template_text import TemplateText, concatenate
from headrace.models.text.tools.use import ToolUse

_BEGIN = TemplateText("You can call functions. To call one, answer with the call alone, in exactly this form:\n")
_END = TemplateText(
    "\nfunction_name is the name of a function, and the arguments are those of its parameters. The functions are:\n"
)
EXAMPLE = {"name": "function_name", "arguments": {"parameter_name": "value"}}
"""The call that an offer shows in the model's form."""


def with_offer(messages: Sequence[Mapping[str, object]], tools: ToolUse, example: str) -> list[Mapping[str, object]]:
    """Return messages whose system message offers the tools. example: a call as the model writes it."""
    functions = "\n".join(json.dumps(definition["function"], ensure_ascii=False) for definition in tools.definitions)
    offer = concatenate([_BEGIN, example, _END, functions])
    return [*messages[: _systems(messages)], {"role": "system", "content": offer}, *messages[_systems(messages) :]]


def _systems(messages: Sequence[Mapping[str, object]]) -> int:
    """Return the number of system messages at the beginning."""
    roles = ("system", "developer")
    return next((index for index, each in enumerate(messages) if each.get("role") not in roles), len(messages))
