"""Mistral from version 3 of its tokenizer on: a list of JSON calls, or from version 11 on a name and arguments.

[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "a1b2c3d4e"}]
[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}
[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Paris"}
"""

import re
from collections.abc import Callable, Sequence

from headrace.models.text.tools.call import Reading, Tool, calls_of
from headrace.models.text.tools.form import Marks, ToolForm, arguments_rule, json_head, quoted
from headrace.models.text.tools.hermes import json_rules
from headrace.models.text.tools.json_value import UnfinishedError, leading_value

MARKUP = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
_NAME = r"\s*([\w.:/-]+)\s*"


def _beginning(text: str) -> str:
    """Return a regular expression of a text's beginnings, the whole text included."""
    return f"(?:{'|'.join(re.escape(text[:length]) for length in range(len(text), -1, -1))})"


class Mistral(ToolForm):
    def __init__(self, marks: Marks) -> None:
        self.rule_begin = MARKUP[0]
        self._begin, self._arguments, self._id = map(marks, MARKUP)
        self.begins = (self._begin,)
        self._lists = MARKUP[1] not in marks.ids
        self.head = (
            json_head() if self._lists else re.compile(f"{re.escape(self._begin)}{_NAME}{re.escape(self._arguments)}")
        )
        stops = f"[^{re.escape(self._arguments[0])}{{]*"
        id = f"{re.escape(self._id)}{stops}"
        self._head = re.compile(f"{_NAME}(?:{id})?(?:{re.escape(self._arguments)})?(?={{)")
        growing = f"{_beginning(self._id)}|(?:{id})?{_beginning(self._arguments)}"
        self._begun = re.compile(f"{_NAME}(?:{growing})\\s*$")

    def read(self, text: str, *, final: bool) -> Reading | None:
        start = len(self._begin)
        body = text[start:]
        if not body.strip() and not final:
            return None
        head = None if body.lstrip().startswith(("[", "{")) else self._head.match(text, start)
        if head is None and not body.lstrip().startswith(("[", "{")):
            return None if not final and self._begun.match(body) else Reading(start)
        try:
            value, end = leading_value(text, head.end() if head else start)
        except UnfinishedError:
            return Reading(start) if final else None
        except ValueError:
            return Reading(start)
        calls = calls_of({"name": head[1], "arguments": value} if head else value)
        return Reading(end, calls) if calls else Reading(start)

    def rules(self, tools: Sequence[Tool], literal: Callable[[str], str]) -> str:
        if self._lists:
            one = json_rules(tools, '{"name": "%s", "arguments": ', "}", "").replace("rest:", "one:", 1)
            more = '(", " one)*' if self.parallel else ""
            return f'rest: "[" one {more} "]"\n{one}'
        calls = " | ".join(f"{quoted(tool.name)} {literal(MARKUP[1])} arguments{n}" for n, tool in enumerate(tools))
        return "\n".join([f"rest: {calls}", *(arguments_rule(n, tool) for n, tool in enumerate(tools))])

    @property
    def separator(self) -> str | None:
        return None if self._lists else ""
