"""Qwen 3 coder, Qwen 3.5, Nemotron 3: tagged parameters.

<tool_call>
<function=get_weather>
<parameter=city>
Paris
</parameter>
</function>
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

MARKUP = ("<tool_call>", "</tool_call>")
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
# A value may contain closing tags: one ends it only before another tag.
_PARAMETER = re.compile(
    r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>|</tool_call>|$))", re.DOTALL
)
_CLOSE = re.compile(r"\s*</function>")
_OPENING = "<function="


class QwenCoder(ToolForm):
    """See `ToolForm`. tools: by name."""

    separator = "\n"
    markup = Markup(
        begin="<tool_call>\n<function=",
        middle=">\n",
        end="</function>\n</tool_call>",
        separator="</function>\n</tool_call>\n<tool_call>\n<function=",
        key_begin="<parameter=",
        key_end=">\n",
        value_end="\n</parameter>\n",
    )

    def __init__(self, marks: Marks, tools: Mapping[str, Tool]) -> None:
        self.rule_begin = MARKUP[0]
        self._marks = marks
        self._begin, self._end = map(marks, MARKUP)
        self.begins = (self._begin, _OPENING)
        self._tools = tools

    def read(self, text: str, *, final: bool) -> Reading | None:
        start = len(self._begin) if text.startswith(self._begin) else 0
        body = text[start:].lstrip()
        if not body.startswith(_OPENING):
            return None if _OPENING.startswith(body) and not final else Reading(max(1, start))
        head = _FUNCTION.match(text, start)
        if head is None:
            return Reading(max(1, start)) if final else None
        position = head.end()
        pairs: list[tuple[str, str]] = []
        while (parameter := _PARAMETER.match(text, position)) is not None:
            pairs.append((parameter[1], parameter[2]))
            position = parameter.end()
        close = _CLOSE.match(text, position)
        if close is None:
            return Reading(max(1, start)) if final else None
        call = tagged_call(head[1].strip(), pairs, self._tools)
        rest = text[close.end() :].lstrip()
        if start and rest.startswith(self._end):
            return Reading(len(text) - len(rest) + len(self._end), (call,))
        if start and not final and self._end.startswith(rest):
            return None
        return Reading(close.end(), (call,))

    def cut_calls(self, text: str) -> tuple[ToolCall, ...]:
        return cut_tagged_calls(text, partial(self.read, final=True), self.markup.mapped(self._marks), self._tools)

    def rules(self, tools: Sequence[Tool], literal: Callable[[str], str]) -> str:
        name_begin = literal("<function=")
        name_end = literal(">\n")
        value_end = literal("\n</parameter>\n")
        tags = TaggedRules(name_begin, name_end, literal("<parameter="), lambda _: name_end, value_end)
        calls, rules = tags.calls(tools)
        return "\n".join([f'rest: "\\n" ({calls}) "</function>\\n" {literal(MARKUP[1])}', *rules])
