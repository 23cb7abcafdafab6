"""The offer of tools as a text, for chat templates that write none."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.models.text.tools.use import ToolUse

_OFFER = (
    "You can call functions. To call one, answer with a JSON object alone: "
    '{"name": the function\'s name, "arguments": an object of its parameters}. The functions are:'
)


def with_offer(messages: Sequence[Mapping[str, Any]], tools: ToolUse) -> list[Mapping[str, Any]]:
    """Return messages whose system message offers the tools."""
    functions = [definition["function"] for definition in tools.definitions]
    offer = "\n".join([_OFFER, *(json.dumps(function, ensure_ascii=False) for function in functions)])
    return [*messages[: _systems(messages)], {"role": "system", "content": offer}, *messages[_systems(messages) :]]


def _systems(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of system messages at the beginning."""
    roles = ("system", "developer")
    return next((index for index, each in enumerate(messages) if each.get("role") not in roles), len(messages))
