"""GLM from 4.5 on: a name and tagged keys and values.

<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>Paris</arg_value>
</tool_call>
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from headrace.models.text.tools.call import Reading, Tool, ToolCall
from headrace.models.text.tools.cut import cut_tagged_calls
from headrace.models.text.tools.form import Marks, ToolForm
from headrace.models.text.tools.markup import Markup
from headrace.models.text.tools.tagged import TaggedRules, tagged_call

MARKUP = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


class GLM(ToolForm):
    """See `ToolForm`. tools: by name."""

    separator = "\n"
    markup = Markup(
        begin="<tool_call>",
        middle="\n",
        end="</tool_call>",
        separator="</tool_call>\n<tool_call>",
        key_begin="<arg_key>",
        key_end="</arg_key>\n<arg_value>",
        value_end="</arg_value>\n",
    )

    def __init__(self, marks: Marks, tools: Mapping[str, Tool]) -> None:
        self.rule_begin = MARKUP[0]
        self._marks = marks
        self._begin, self._end, *tags = map(marks, MARKUP)
        self.begins = (self._begin,)
        self._key = tags[0]
        key, key_end, value, value_end = map(re.escape, tags)
        self._pair = re.compile(rf"\s*{key}(.*?){key_end}\s*{value}(.*?){value_end}", re.DOTALL)
        self._name = re.compile(r"\s*([\w.:/-]+)\s*")
        self._tools = tools

    def read(self, text: str, *, final: bool) -> Reading | None:
        start = len(self._begin)
        name = self._name.match(text, start)
        if name is None:
            return None if not text[start:].strip() and not final else Reading(start)
        pairs = list[tuple[str, str]]()
        position = name.end()
        while (pair := self._pair.match(text, position)) is not None:
            pairs.append((pair[1].strip(), pair[2]))
            position = pair.end()
        rest = text[position:].lstrip()
        if rest.startswith(self._end):
            return Reading(len(text) - len(rest) + len(self._end), (tagged_call(name[1], pairs, self._tools),))
        growing = any(tag.startswith(rest) or rest.startswith(tag) for tag in (self._key, self._end))
        return None if growing and not final else Reading(start)

    def cut_calls(self, text: str) -> tuple[ToolCall, ...]:
        return cut_tagged_calls(text, partial(self.read, final=True), self.markup.mapped(self._marks), self._tools)

    def rules(self, tools: Sequence[Tool], literal: Callable[[str], str]) -> str:
        key_end = literal("</arg_key>\n<arg_value>")
        tags = TaggedRules("", literal("\n"), literal("<arg_key>"), lambda _: key_end, literal("</arg_value>\n"))
        calls, rules = tags.calls(tools)
        return "\n".join([f"rest: ({calls}) {literal(MARKUP[1])}", *rules])
