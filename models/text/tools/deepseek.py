"""DeepSeek 3 and later.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
```json
{"city": "Paris"}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>                                              3, R1
<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>...     3.1
<｜DSML｜function_calls><｜DSML｜invoke name="get_weather">
<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter></｜DSML｜invoke>...                     3.2
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence

from headrace.models.text.tools.call import KINDS, Reading, Tool, ToolCall
from headrace.models.text.tools.form import Marks, ToolForm, arguments_rule, quoted
from headrace.models.text.tools.json_value import UnfinishedError, leading_value
from headrace.models.text.tools.markup import Markup
from headrace.models.text.tools.tagged import TaggedRules, tagged_call

MARKUP = (
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    "｜DSML｜",
)
_SECTION = "(?:function_calls|tool_calls)"
_FENCE = "```"


_BEGIN, _END, _CALL, _CALL_END, _SEPARATOR, _TAG = MARKUP
_FENCED = Markup(
    begin=f"{_BEGIN}{_CALL}function{_SEPARATOR}",
    middle=f"\n{_FENCE}json\n",
    end=f"\n{_FENCE}{_CALL_END}{_END}",
    separator=f"\n{_FENCE}{_CALL_END}\n{_CALL}function{_SEPARATOR}",
)
_PLAIN = Markup(
    begin=f"{_BEGIN}{_CALL}",
    middle=_SEPARATOR,
    end=f"{_CALL_END}{_END}",
    separator=f"{_CALL_END}{_CALL}",
)
_TAGGED = Markup(
    begin=f'<{_TAG}function_calls>\n<{_TAG}invoke name="',
    middle='">\n',
    end=f"</{_TAG}invoke>\n</{_TAG}function_calls>",
    separator=f'</{_TAG}invoke>\n<{_TAG}invoke name="',
    key_begin=f'<{_TAG}parameter name="',
    key_end='" string="true">',
    value_end=f"</{_TAG}parameter>\n",
    typed_key_ends=dict.fromkeys(KINDS - {"string"}, '" string="false">'),
)


class DeepSeek(ToolForm):
    """See `ToolForm`. fenced: calls as in 3 and R1. tools: by name."""

    def __init__(self, marks: Marks, tools: Mapping[str, Tool], *, fenced: bool, tagged: bool) -> None:
        self._begin, self._end, self._call, self._call_end, self._separator, tag = map(marks, MARKUP)
        self.begins = (self._begin, f"<{tag}function_calls>", f"<{tag}tool_calls>")
        self.markup = _TAGGED if tagged else _FENCED if fenced else _PLAIN
        self._fenced, self._tagged, self._tools = fenced, tagged, tools
        self.rule_begin = f"<{MARKUP[-1]}function_calls>" if tagged else MARKUP[0]
        call, separator = re.escape(self._call), re.escape(self._separator)
        plain = f"{call}(?:function{separator})?([\\w.:/-]+)(?:{separator}|\\n{_FENCE}json\\n)(?={{)"
        self.head = None if tagged else re.compile(plain)
        name = re.escape(tag)
        self._tagged_end = re.compile(f"</{name}{_SECTION}>")
        self._invoke = re.compile(f'<{name}invoke name="([^"]+)">(.*?)</{name}invoke>', re.DOTALL)
        self._parameter = re.compile(
            f'<{name}parameter name="([^"]+)"(?: string="(true|false)")?>(.*?)</{name}parameter>', re.DOTALL
        )

    def read(self, text: str, *, final: bool) -> Reading | None:
        if not text.startswith(self._begin):
            return self._read_tagged(text, final=final)
        place, calls = len(self._begin), list[ToolCall]()
        while True:
            rest = text[place:].lstrip()
            place = len(text) - len(rest)
            if rest.startswith(self._end):
                return Reading(place + len(self._end), tuple(calls))
            if not rest.startswith(self._call):
                growing = not final and (self._end.startswith(rest) or self._call.startswith(rest))
                return None if growing else Reading(place, tuple(calls))
            found = self._read_call(text, place + len(self._call))
            if found is None:
                return Reading(place, tuple(calls)) if final else None
            call, place = found
            calls.append(call)

    def _read_call(self, text: str, place: int) -> tuple[ToolCall, int] | None:
        """Return the call that begins at `place`, and the place behind it; None if it is incomplete or none."""
        separator = text.find(self._separator, place)
        if separator < 0:
            return None
        name, start = text[place:separator].strip(), separator + len(self._separator)
        if (fence := text.find(f"{_FENCE}json", start)) >= 0 and name == "function":
            name, start = text[start:fence].strip(), fence + len(_FENCE) + 4
        try:
            value, end = leading_value(text, start)
        except (UnfinishedError, ValueError):
            return None
        closed = text.find(self._call_end, end)
        if closed < 0 or not isinstance(value, dict):
            return None
        return ToolCall(name, json.dumps(value, ensure_ascii=False)), closed + len(self._call_end)

    def _read_tagged(self, text: str, *, final: bool) -> Reading | None:
        end = self._tagged_end.search(text)
        if end is None and not final:
            return None
        whole = text[: end.start()] if end else text
        calls = tuple(self._tagged_call(name, body) for name, body in self._invoke.findall(whole))
        return Reading(end.end() if end and calls else len(text) if calls else 1, calls)

    def _tagged_call(self, name: str, body: str) -> ToolCall:
        found: list[tuple[str, str, str]] = self._parameter.findall(body)
        texts = {key for key, is_text, _ in found if is_text == "true"}
        return tagged_call(name, ((key, value) for key, _, value in found), self._tools, texts)

    def rules(self, tools: Sequence[Tool], literal: Callable[[str], str]) -> str:
        if self._tagged:
            return self._tagged_rules(tools, literal)
        begin, end, separator = literal(MARKUP[2]), literal(MARKUP[3]), literal(MARKUP[4])
        calls = []
        for number, tool in enumerate(tools):
            if self._fenced:
                head = f'"function" {separator} {quoted(tool.name + chr(10) + "```json" + chr(10))}'
                calls.append(f'call{number}: {head} arguments{number} "\\n```"')
            else:
                calls.append(f"call{number}: {quoted(tool.name)} {separator} arguments{number}")
        names = " | ".join(f"call{number}" for number in range(len(tools)))
        one = f"one: {begin} ({names}) {end}"
        between = '"\\n"' if self._fenced else ""
        rest = f"rest: one ({between} one)* {literal(MARKUP[1])}"
        return "\n".join([rest, one, *calls, *(arguments_rule(n, tool) for n, tool in enumerate(tools))])

    def _tagged_rules(self, tools: Sequence[Tool], literal: Callable[[str], str]) -> str:
        tag = MARKUP[-1]
        tags = TaggedRules(
            name_begin=literal(f'<{tag}invoke name="'),
            name_end=literal('">\n'),
            key_begin=literal(f'<{tag}parameter name="'),
            key_end=lambda kind: literal(f'" string="{"true" if kind == "string" else "false"}">'),
            value_end=literal(f"</{tag}parameter>\n"),
            end=literal(f"</{tag}invoke>\n"),
        )
        calls, rules = tags.calls(tools)
        times = "+" if self.parallel else ""
        return "\n".join([f'rest: "\\n" ({calls}){times} {literal(f"</{tag}function_calls>")}', *rules])
