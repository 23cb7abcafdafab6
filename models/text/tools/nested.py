"""MiniMax M3: tags named by parameters, and nested ones for objects and lists. A control token stands before each tag.

The control token is left out here:

<tool_call>
<invoke name="get_weather"><city>Paris</city><days><item>1</item><item>2</item></days><at><hour>9</hour></at></invoke>
</tool_call>

Guards: tests/models/text/tools/test_forms.py and test_round_trip.py.
"""

import re
from collections.abc import Callable, Container, Mapping, Sequence, Set
from functools import partial

from headrace.models.text.tools.call import Reading, Tool, ToolCall, kinds_of, part_of, typed_text
from headrace.models.text.tools.cut import closed_calls, without_half
from headrace.models.text.tools.form import MarkupTokens, ToolForm, one_call, quoted
from headrace.models.text.tools.json_value import UnfinishedError
from headrace.models.text.tools.tagged import text_rules, written_plainly
from headrace.models.text.tools.value_rules import Schema, ValueRules

_MARK = "]<]minimax[>["
BEGIN = f"{_MARK}<tool_call>"
MARKUP = (_MARK,)
_ITEM = "item"


class Nested(ToolForm):
    """See `ToolForm`. tools: by name."""

    rule_begin = BEGIN

    def __init__(self, marks: MarkupTokens, tools: Mapping[str, Tool]) -> None:
        self._tools = tools
        self._mark = marks(_MARK)
        self.begins = (marks(BEGIN),)
        mark = re.escape(self._mark)
        self._invoke = re.compile(rf"\s*{mark}<invoke name=\"([^\"<>]+)\">")
        self._invoke_end = re.compile(rf"\s*{mark}</invoke>")
        self._end = re.compile(rf"\s*{mark}</tool_call>")
        self._tag = re.compile(rf"\s*{mark}<([^<>/\s][^<>]*)>")
        self._any_tag = re.compile(rf"{mark}<(/?)([^<>\s]+)[^<>]*>")

    def read(self, text: str, *, final: bool) -> Reading | None:
        position = len(self.begins[0])
        calls: list[ToolCall] = []
        while (end := self._end.match(text, position)) is None:
            try:
                call, position = self._call(text, position)
            except UnfinishedError:
                return Reading(position, tuple(calls)) if final else None
            except (ValueError, RecursionError):
                return Reading(position, tuple(calls))
            calls.append(call)
        return Reading(end.end(), tuple(calls))

    def _call(self, text: str, position: int) -> tuple[ToolCall, int]:
        """Return the call at `position`, and the position after it. Raises UnfinishedError, or ValueError for none."""
        head = self._invoke.match(text, position)
        if head is None:
            rest = text[position:].lstrip()
            begun = f'{self._mark}<invoke name="'
            ended = f"{self._mark}</tool_call>"
            if rest.startswith(begun) or begun.startswith(rest) or ended.startswith(rest):
                raise UnfinishedError
            raise ValueError("no call")
        name = head[1]
        tool = self._tools.get(name)
        schema = {} if tool is None else tool.parameters
        pairs, position = self._elements(text, head.end(), schema, schema)
        end = self._invoke_end.match(text, position)
        if end is None:
            raise UnfinishedError
        return ToolCall.of(name, dict(pairs)), end.end()

    def _elements(
        self, text: str, position: int, schema: object, document: Schema
    ) -> tuple[list[tuple[str, object]], int]:
        """Return the tags at `position` with their values, and the position after them.

        schema: of the object or the list that they are.
        document: the schema that references point into.
        """
        pairs: list[tuple[str, object]] = []
        while (tag := self._tag.match(text, position)) is not None:
            name = tag[1]
            closing = f"{self._mark}</{name}>"
            value, position = self._value(text, tag.end(), closing, part_of(schema, name, document), document)
            pairs.append((name, value))
        return pairs, position

    def _value(self, text: str, start: int, closing: str, schema: object, document: Schema) -> tuple[object, int]:
        """Return the value between two tags, and the position after the second, `closing`."""
        kinds = kinds_of(schema, document)
        tag = self._tag.match(text, start)
        if tag is None:  # no tags in it: a text, a number or a constant
            end = text.find(closing, start)
            if end < 0:
                raise UnfinishedError
            written = text[start:end]
            if not written and "string" not in kinds:
                return _empty(kinds), end + len(closing)
            return typed_text(kinds, written), end + len(closing)
        is_list = tag[1] == _ITEM and ("array" in kinds or "object" not in kinds)
        if is_list:
            schema = {"properties": {_ITEM: part_of(schema, None, document)}}
        elements, position = self._elements(text, start, schema, document)
        if not text.startswith(closing, position):
            raise UnfinishedError
        after = position + len(closing)
        if is_list:
            return [value for _, value in elements], after
        return dict(elements), after

    def cut_calls(self, text: str) -> tuple[ToolCall, ...]:
        # The text without half a tag at its end, and the tags that are open there, which `closed` closes.
        whole = without_half(text, self._mark)
        begun = whole.rfind(self._mark)
        if begun >= 0 and self._any_tag.match(whole, begun) is None:  # half a tag
            whole = whole[:begun]
        opened: list[str] = []  # "tool_call", "invoke", then those of parameters
        for tag in self._any_tag.finditer(whole):
            if tag[1]:
                opened = opened[:-1]
            elif tag.end() == len(whole) and opened[1:]:  # nothing of the value has come
                whole = whole[: tag.start()]
            else:
                opened.append(tag[2])
        closed = whole + "".join(f"{self._mark}</{name}>" for name in reversed(opened))
        return closed_calls([closed], partial(self.read, final=True), self._tools)

    def rules(self, tools: Sequence[Tool], literal: Callable[[str], str]) -> str:
        calls = f"({one_call(tools)})"
        if self.parallel:
            calls += "+"
        mark = literal(_MARK)
        rules = [
            f'rest: "\\n" {calls} {mark} "</tool_call>"',
            "KEY: /[A-Za-z_][A-Za-z0-9_.-]{0,63}/",
            f'element: {mark} "<" KEY ">" inner "</" KEY ">"',
            "NUMBER: /-?(0|[1-9][0-9]{0,17})(\\.[0-9]{1,17})?/",
            f"inner: element+ {mark} | plain",
            *text_rules("plain", mark),
            f'items: ({mark} "<{_ITEM}>" inner "</{_ITEM}>")*',
        ]
        for number, tool in enumerate(tools):
            values = _NestedValueRules(mark, tool.parameters)
            pairs = "element*"
            if not tool.free:
                pairs = values.pairs(str(number), tool.properties, tool.required, depth=0)
            begin = quoted(f'<invoke name="{tool.name}">')
            rules += [f'call{number}: {mark} {begin} {pairs} {mark} "</invoke>\\n"', *values.rules]
        return "\n".join(rules)


class _NestedValueRules(ValueRules):
    """See `ValueRules`. mark: Lark of the control token, which the closing tag of each value begins with.

    It is a rule's part of its own everywhere: the lexer takes the longest literal, and so no other tag.
    """

    of_kind: Mapping[str, str] = {
        "number": "NUMBER",
        "boolean": '"true" | "false"',
        "null": '"null"',
        "array": "items",
        "object": "element*",
    }

    def __init__(self, mark: str, document: Mapping[str, object]) -> None:
        super().__init__(document)
        self.end = mark

    def pair(self, key: str, value: str) -> str:
        return f"{self.end} {quoted(f'<{key}>')} {value} {quoted(f'</{key}>')}"

    def object(self, pairs: str) -> str:
        return pairs

    def item(self, value: str) -> str:
        return self.pair(_ITEM, value)

    def list(self, items: str) -> str:
        return items

    def text(self, rule: str, schema: Schema) -> Sequence[str]:
        return text_rules(rule, self.end, schema)

    def scalar(self, value: str | float | None) -> str:
        return quoted(written_plainly(value))

    def _add_any(self, rule: str, kinds: Container[str]) -> None:
        if "string" not in kinds:
            super()._add_any(rule, kinds)
            return
        # A text, whose rule ends with `end`, may also spell a number or a constant.
        text = f"{rule}t"
        elements = ""
        if "object" in kinds or "array" in kinds:
            elements = f" | element+ {self.end}"
        self.rules += [f"{rule}: {text}{elements}", *text_rules(text, self.end)]


def _empty(kinds: Set[str]) -> object:
    """Return the value of two tags with nothing between, where it is no text."""
    if "array" in kinds:
        return []
    if "object" in kinds:
        return {}
    return None
