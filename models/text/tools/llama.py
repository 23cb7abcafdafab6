"""Llama 3: an answer that is a JSON object, or several with semicolons between, sometimes behind `<|python_tag|>`.

{"name": "get_weather", "parameters": {"city": "Paris"}}
"""

from collections.abc import Callable, Sequence

from headrace.models.text.tools.call import Reading, Tool, ToolCall, calls_of
from headrace.models.text.tools.form import Marks, ToolForm, json_head
from headrace.models.text.tools.hermes import json_rules
from headrace.models.text.tools.json_value import UnfinishedError, leading_value
from headrace.models.text.tools.markup import Markup

MARKUP = ("<|python_tag|>",)


class Llama(ToolForm):
    """See `ToolForm`. names: of the tools; JSON without markup has to name one of them."""

    head = json_head("parameters")

    bare = True
    separator = "; "
    markup = Markup(begin='{"name": "', middle='", "parameters": ', end="}", separator='}; {"name": "')
    rule_begin = ""
    _before = '{"name": "%s", "parameters": '

    def __init__(self, marks: Marks, names: Sequence[str] = ()) -> None:
        self._begin = marks(MARKUP[0])
        self.begins: Sequence[str] = (self._begin,)
        self._names = names

    def read(self, text: str, *, final: bool) -> Reading | None:
        marked = text.startswith(self._begin)
        place, calls = len(self._begin) if marked else 0, list[ToolCall]()
        while True:
            try:
                value, end = leading_value(text, place)
            except UnfinishedError:
                if final:
                    break
                return None
            except ValueError:
                break
            found = calls_of(value)
            if not found or not (marked or all(call.name in self._names for call in found)):
                break
            calls += found
            place = end
            rest = text[end:].lstrip()
            if not rest and not final:
                return None  # a semicolon and another call may follow
            if not rest.startswith(";"):
                break
            place = len(text) - len(rest) + 1
        return Reading(place if calls else max(place, 1), tuple(calls))

    def cut_calls(self, text: str) -> tuple[ToolCall, ...]:
        return tuple(call for call in super().cut_calls(text) if call.name in self._names)

    def rules(self, tools: Sequence[Tool], literal: Callable[[str], str]) -> str:
        return json_rules(tools, self._before, "}", literal(""))
