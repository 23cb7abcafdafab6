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

from headrace.models.text.tools.call import Reading, Tool, no_call
from headrace.models.text.tools.form import Marks
from headrace.models.text.tools.markup import Markup
from headrace.models.text.tools.tagged import tagged_call
from headrace.models.text.tools.written import Written

_OPENING = "<function="
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
# A value may contain closing tags: one ends it only before another tag.
_PARAMETER = re.compile(
    r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>|</tool_call>|$))", re.DOTALL
)
_CLOSE = re.compile(r"\s*</function>")
_MARKUP = Markup(
    begin="<tool_call>\n<function=",
    middle=">\n",
    end="</function>\n</tool_call>",
    separator="</function>\n</tool_call>\n<tool_call>\n<function=",
    key_begin="<parameter=",
    key_end=">\n",
    value_end="\n</parameter>\n",
)


class QwenCoder(Written):
    """Calls that models write without `<tool_call>`, too. tools: by name."""

    separator = "\n"

    def __init__(self, marks: Marks, tools: Mapping[str, Tool]) -> None:
        super().__init__(marks, tools, _MARKUP)
        self.begins = (marks("<tool_call>"), _OPENING)
        self._call_end = marks("</tool_call>")

    def read(self, text: str, *, final: bool) -> Reading | None:
        start = 0
        if text.startswith(self.begins[0]):
            start = len(self.begins[0])
        body = text[start:].lstrip()
        if not body.startswith(_OPENING):
            return no_call(max(1, start), final=final or not _OPENING.startswith(body))
        head = _FUNCTION.match(text, start)
        if head is None:
            return no_call(max(1, start), final=final)
        position = head.end()
        pairs: list[tuple[str, str]] = []
        while (parameter := _PARAMETER.match(text, position)) is not None:
            pairs.append((parameter[1], parameter[2]))
            position = parameter.end()
        close = _CLOSE.match(text, position)
        if close is None:
            return no_call(max(1, start), final=final)
        call = tagged_call(head[1].strip(), pairs, self._tools)
        rest = text[close.end() :].lstrip()
        if start and rest.startswith(self._call_end):
            return Reading(len(text) - len(rest) + len(self._call_end), (call,))
        if start and not final and self._call_end.startswith(rest):
            return None
        return Reading(close.end(), (call,))

    def rules(self, tools: Sequence[Tool], literal: Callable[[str], str]) -> str:
        calls, rules = self._tagged_rules(literal).calls(tools)
        return "\n".join([f'rest: "\\n<function=" ({calls}) "</function>\\n" {literal("</tool_call>")}', *rules])
