"""Mistral from version 3 of its tokenizer on: a list of JSON calls, or from version 11 on a name and arguments.

[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "a1b2c3d4e"}]
[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}
[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Paris"}

Guards: tests/models/text/tools/test_forms.py and test_round_trip.py.
"""

import re
from collections.abc import Callable, Sequence

from headrace.models.text.tools.call import Reading, Tool, ToolCall, calls_of, no_call
from headrace.models.text.tools.cut import cut_json_calls
from headrace.models.text.tools.form import MarkupTokens, ToolForm, arguments_rules, json_head, quoted
from headrace.models.text.tools.json_forms import json_list_rules
from headrace.models.text.tools.json_value import UnfinishedError, leading_value
from headrace.models.text.tools.markup import Markup

BEGIN = "[TOOL_CALLS]"
ARGUMENTS = "[ARGS]"
CALL_ID = "[CALL_ID]"
MARKUP = (BEGIN, ARGUMENTS, CALL_ID)
_NAME = r"\s*([\w.:/-]+)\s*"  # of a tool, as a regular expression


def _beginning(text: str) -> str:
    """Return a regular expression of a text's beginnings, the whole text included."""
    return f"(?:{'|'.join(re.escape(text[:length]) for length in range(len(text), -1, -1))})"


_LIST = Markup(
    begin='[TOOL_CALLS][{"name": "',
    middle='", "arguments": ',
    end="}]",
    separator='}, {"name": "',
)
_MARKED = Markup(begin="[TOOL_CALLS]", middle="[ARGS]", end="", separator="[TOOL_CALLS]")


class Mistral(ToolForm):
    """See `ToolForm`. writes_ids: each call has an identifier."""

    def __init__(self, marks: MarkupTokens, *, writes_ids: bool = False) -> None:
        self._writes_ids = writes_ids
        self.rule_begin = BEGIN
        self._begin, self._arguments, self._id = map(marks, MARKUP)
        self.begins = (self._begin,)
        # Three patterns of the text before a call's arguments. A change of one is a change of all.
        # `_head`, from the name to `{`: `get_weather[CALL_ID]a1b2c3d4e[ARGS]`. Both may be missing after the name.
        # `head`, that of `ToolForm`, from the mark on: `[TOOL_CALLS]get_weather[ARGS]`.
        # `_begun`, any beginning of `_head`: `get_weather[CALL_ID]a1b2c3d4e[AR`.
        stops = f"[^{re.escape(self._arguments[0])}{{]*"
        id = f"{re.escape(self._id)}{stops}"
        self._head = re.compile(f"{_NAME}(?:{id})?(?:{re.escape(self._arguments)})?(?={{)")
        self._lists = ARGUMENTS not in marks.ids  # versions before 11
        if self._lists:
            self.markup = _LIST
            self.head = json_head()
        else:
            self.separator = ""
            self.markup = _MARKED
            self.head = re.compile(f"{re.escape(self._begin)}{_NAME}(?:{id})?{re.escape(self._arguments)}")
        growing = f"{_beginning(self._id)}|(?:{id})?{_beginning(self._arguments)}"
        self._begun = re.compile(f"{_NAME}(?:{growing})\\s*$")

    def read(self, text: str, *, final: bool) -> Reading | None:
        start = len(self._begin)
        body = text[start:]
        if not body.strip() and not final:
            return None
        name = None  # of a call whose arguments follow it; else the JSON has it
        arguments = start
        if not body.lstrip().startswith(("[", "{")):
            head = self._head.match(text, start)
            if head is None:
                return no_call(start, final=final or self._begun.match(body) is None)
            name = head[1]
            arguments = head.end()
        try:
            value, end = leading_value(text, arguments)
        except UnfinishedError:
            return no_call(start, final=final)
        except ValueError:
            return Reading(start)
        if name is not None:
            value = {"name": name, "arguments": value}
        calls = calls_of(value)
        if not calls:
            return Reading(start)
        return Reading(end, calls)

    def cut_calls(self, text: str) -> tuple[ToolCall, ...]:
        return super().cut_calls(text) or cut_json_calls(text, json_head())

    def rules(self, tools: Sequence[Tool], literal: Callable[[str], str]) -> str:
        if self._lists:
            return json_list_rules(tools, parallel=self.parallel)
        middle = literal(ARGUMENTS)
        if self._writes_ids:
            middle = f"{literal(CALL_ID)} /[a-zA-Z0-9]{{9}}/ {middle}"
        calls = " | ".join(f"{quoted(tool.name)} {middle} arguments{n}" for n, tool in enumerate(tools))
        return "\n".join([f"rest: {calls}", *arguments_rules(tools)])
