"""DeepSeek 3 and later.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
```json
{"city": "Paris"}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>                                              3, R1
<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>...     3.1
<｜DSML｜function_calls><｜DSML｜invoke name="get_weather">
<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter></｜DSML｜invoke>...                     3.2

Guard: tests/models/text/tools/test_forms.py.
"""

import re
from collections.abc import Callable, Sequence

from headrace.models.text.tools.call import KINDS, Reading, Tool, ToolCall
from headrace.models.text.tools.form import MarkupTokens, ToolForm, arguments_rules, one_call, quoted
from headrace.models.text.tools.json_value import UnfinishedError, leading_value
from headrace.models.text.tools.markup import Markup

MARKUP = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "｜DSML｜",
)
_FENCE = "```"
_JSON_FENCE = f"\n{_FENCE}json\n"
_BEGIN, _END, _CALL, _CALL_END, _SEPARATOR, _TAG = MARKUP
_FENCED = Markup(
    begin=f"{_BEGIN}{_CALL}function{_SEPARATOR}",
    middle=_JSON_FENCE,
    end=f"\n{_FENCE}{_CALL_END}{_END}",
    separator=f"\n{_FENCE}{_CALL_END}\n{_CALL}function{_SEPARATOR}",
)
_PLAIN = Markup(
    begin=f"{_BEGIN}{_CALL}",
    middle=_SEPARATOR,
    end=f"{_CALL_END}{_END}",
    separator=f"{_CALL_END}{_CALL}",
)


def tagged_markup(section: str) -> Markup:
    """Return the markup of 3.2 and 4. section: the name of the tag around calls."""
    tag = _TAG
    return Markup(
        begin=f'<{tag}{section}>\n<{tag}invoke name="',
        middle='">\n',
        end=f"</{tag}invoke>\n</{tag}{section}>",
        separator=f'</{tag}invoke>\n<{tag}invoke name="',
        key_begin=f'<{tag}parameter name="',
        key_end='" string="true">',
        value_end=f"</{tag}parameter>\n",
        typed_key_ends=dict.fromkeys(KINDS - {"string"}, '" string="false">'),
    )


class DeepSeek(ToolForm):
    """See `ToolForm`. `Written` reads 3.2. fenced: calls as in 3 and R1, not 3.1."""

    def __init__(self, marks: MarkupTokens, *, fenced: bool) -> None:
        self._begin, self._end, self._call, self._call_end, self._separator, _ = map(marks, MARKUP)
        self.begins = (self._begin,)
        self.markup = _FENCED if fenced else _PLAIN
        self._fenced = fenced
        self.rule_begin = _BEGIN
        call = re.escape(self._call)
        separator = re.escape(self._separator)
        name = f"{call}(?:function{separator})?([\\w.:/-]+)(?:{separator}|\\n{_FENCE}json\\n)(?={{)"
        self.head = re.compile(name)

    def read(self, text: str, *, final: bool) -> Reading | None:
        position = len(self._begin)
        calls: list[ToolCall] = []
        while True:
            rest = text[position:].lstrip()
            position = len(text) - len(rest)
            if rest.startswith(self._end):
                return Reading(position + len(self._end), tuple(calls))
            if not rest.startswith(self._call):
                if not final and (self._end.startswith(rest) or self._call.startswith(rest)):
                    return None
                return Reading(position, tuple(calls))
            parsed = self._read_call(text, position + len(self._call))
            if parsed is None and not final:
                return None
            if parsed is None:
                return Reading(position, tuple(calls))
            call, position = parsed
            calls.append(call)

    def _read_call(self, text: str, position: int) -> tuple[ToolCall, int] | None:
        """Return the call that begins at `position`, and the position after it; None if it is incomplete or none."""
        separator = text.find(self._separator, position)
        if separator < 0:
            return None
        name = text[position:separator].strip()
        start = separator + len(self._separator)
        # 3 and R1: the name stands after the separator, and the arguments in a fence.
        fence = text.find(f"{_FENCE}json", start)
        if fence >= 0 and name == "function":
            name = text[start:fence].strip()
            start = fence + len(f"{_FENCE}json")
        try:
            value, end = leading_value(text, start)
        except (UnfinishedError, ValueError):
            return None
        closed = text.find(self._call_end, end)
        if closed < 0 or not isinstance(value, dict):
            return None
        return ToolCall.of(name, value), closed + len(self._call_end)

    def rules(self, tools: Sequence[Tool], literal: Callable[[str], str]) -> str:
        begin = literal(_CALL)
        end = literal(_CALL_END)
        separator = literal(_SEPARATOR)
        calls: list[str] = []
        for number, tool in enumerate(tools):
            if self._fenced:
                head = f'"function" {separator} {quoted(f"{tool.name}{_JSON_FENCE}")}'
                calls.append(f'call{number}: {head} arguments{number} "\\n```"')
            else:
                calls.append(f"call{number}: {quoted(tool.name)} {separator} arguments{number}")
        rule = f"one: {begin} ({one_call(tools)}) {end}"
        between = '"\\n"' if self._fenced else ""
        more = ""
        if self.parallel:
            more = f"({between} one)*"
        rest = f"rest: one {more} {literal(_END)}"
        return "\n".join([rest, rule, *calls, *arguments_rules(tools)])
