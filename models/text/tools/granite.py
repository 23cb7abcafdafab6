"""Granite 3: a list of JSON calls up to the end of the turn.

<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]
"""

from collections.abc import Callable, Sequence

from headrace.models.text.tools.call import Reading, Tool
from headrace.models.text.tools.form import Marks, ToolForm, json_head
from headrace.models.text.tools.hermes import json_list_rules, read_json
from headrace.models.text.tools.markup import Markup

MARKUP = ("<|tool_call|>",)


class Granite(ToolForm):
    head = json_head()
    markup = Markup(
        begin='<|tool_call|>[{"name": "',
        middle='", "arguments": ',
        end="}]",
        separator='}, {"name": "',
    )

    def __init__(self, marks: Marks) -> None:
        [self.rule_begin] = MARKUP
        self._begin = marks(self.rule_begin)
        self.begins = (self._begin,)

    def read(self, text: str, *, final: bool) -> Reading | None:
        return read_json(text, len(self._begin), "", final=final)

    def rules(self, tools: Sequence[Tool], literal: Callable[[str], str]) -> str:  # noqa: ARG002 - all of it is text
        return json_list_rules(tools, parallel=self.parallel)
