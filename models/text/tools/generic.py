"""Models without a form of their own: an answer that is a JSON object or a list of them, maybe in a fence.

{"name": "get_weather", "arguments": {"city": "Paris"}}
"""

import re
from collections.abc import Callable, Sequence

from headrace.models.text.tools.call import Reading, Tool, ToolCall, calls_of, no_call
from headrace.models.text.tools.form import Marks, ToolForm, json_head
from headrace.models.text.tools.hermes import ended, json_rules
from headrace.models.text.tools.json_value import UnfinishedError, leading_value

_FENCE = re.compile(r"\s*```(?:json|tool_call|tool_code)?\s*(?=[{\[])")
_CLOSE = "```"
_OPENINGS = ("```json", "```tool_call", "```tool_code", "```")


class Generic(ToolForm):
    """See `ToolForm`. names: of the tools; the JSON has to name one of them."""

    head = json_head()

    begins: Sequence[str] = ()
    bare = True
    rule_begin = ""

    def __init__(self, _marks: Marks, names: Sequence[str] = ()) -> None:
        self._names = names

    def read(self, text: str, *, final: bool) -> Reading | None:
        fence = _FENCE.match(text)
        if fence is None and text.lstrip().startswith("`"):
            start = text.strip()
            growing = any(opening.startswith(start) for opening in _OPENINGS) or start in _OPENINGS
            return no_call(1, final=final or not growing)
        start_of_json = 0
        close = ""
        if fence is not None:
            start_of_json = fence.end()
            close = _CLOSE
        elif text.lstrip().startswith(","):  # between calls
            start_of_json = text.find(",") + 1
        try:
            value, position = leading_value(text, start_of_json)
        except UnfinishedError:
            return no_call(1, final=final)
        except ValueError:
            return Reading(1)
        calls = calls_of(value)
        if not calls or not all(call.name in self._names for call in calls):
            return Reading(1)
        return ended(text, position, close, calls=Reading(position, calls), final=final)

    def cut_calls(self, text: str) -> tuple[ToolCall, ...]:
        return tuple(call for call in super().cut_calls(text) if call.name in self._names)

    def rules(self, tools: Sequence[Tool], literal: Callable[[str], str]) -> str:
        return json_rules(tools, '{"name": "%s", "arguments": ', "}", literal(""))
