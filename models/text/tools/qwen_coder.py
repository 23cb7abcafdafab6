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

from headrace.models.text.tools.call import Reading, Tool
from headrace.models.text.tools.form import Marks, ToolForm
from headrace.models.text.tools.tagged import call_rules, tagged_call

MARKUP = ("<tool_call>", "</tool_call>")
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_OPENING = "<function="


class QwenCoder(ToolForm):
    """See `ToolForm`. tools: by name."""

    def __init__(self, marks: Marks, tools: Mapping[str, Tool]) -> None:
        self.rule_begin = MARKUP[0]
        self._begin, self._end = map(marks, MARKUP)
        self.begins = (self._begin, _OPENING)
        self._tools = tools

    def read(self, text: str, *, final: bool) -> Reading | None:
        start = len(self._begin) if text.startswith(self._begin) else 0
        body = text[start:].lstrip()
        if not body.startswith(_OPENING):
            return None if _OPENING.startswith(body) and not final else Reading(max(1, start))
        if (found := _FUNCTION.match(text, start)) is None:
            return Reading(max(1, start)) if final else None
        call = tagged_call(found[1].strip(), _PARAMETER.findall(found[2]), self._tools)
        rest = text[found.end() :].lstrip()
        if start and rest.startswith(self._end):
            return Reading(len(text) - len(rest) + len(self._end), (call,))
        if start and not final and self._end.startswith(rest):
            return None
        return Reading(found.end(), (call,))

    def rules(self, tools: Sequence[Tool], literal: Callable[[str], str]) -> str:
        calls, rules = call_rules(tools, "<function=%s>\n", "<parameter=%s>\n", "\n</parameter>\n", literal)
        return "\n".join([f'rest: "\\n" ({calls}) "</function>\\n" {literal(MARKUP[1])}', *rules])

    @property
    def separator(self) -> str | None:
        return "\n"
