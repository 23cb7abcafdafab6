"""Gemma 4, and FunctionGemma: calls with keys without quotes, and texts between quotes of their own.

<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>
<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3}<end_function_call>

Guards: tests/models/text/tools/test_forms.py and test_round_trip.py.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from headrace.models.text.tools.call import PYTHON_CONSTANTS, Reading, Tool, ToolCall, no_call
from headrace.models.text.tools.cut import closed_calls, without_half
from headrace.models.text.tools.form import MarkupTokens, ToolForm, one_call, quoted
from headrace.models.text.tools.tagged import text_rules
from headrace.models.text.tools.value_rules import Schema, ValueRules

# The texts that begin and end a call, and the mark around a text
MARKUP = ("<|tool_call>", "<tool_call|>", '<|"|>')
OLDER = ("<start_function_call>", "<end_function_call>", "<escape>")
# `call:get_weather` before the brace of its arguments; a beginning of that text; a value without quotes.
_HEAD = re.compile(r"\s*call:([\w.:/-]+)(?=\{)")
_BEGUN = re.compile(r"\s*(?:c|ca|cal|call|call:[\w.:/-]*)?$")
_PLAIN = re.compile(r"[^,{}\[\]]+")


class Gemma(ToolForm):
    """See `ToolForm`.

    marks: tokens of the markup.
    tools: by name.
    markup: MARKUP or OLDER.
    """

    separator = ""

    def __init__(self, marks: MarkupTokens, tools: Mapping[str, Tool], markup: Sequence[str] = MARKUP) -> None:
        self._tools = tools
        self._tokens = markup
        self.rule_begin = markup[0]
        self._begin, self._end, self._quote = map(marks, markup)
        self.begins = (self._begin,)

    def read(self, text: str, *, final: bool) -> Reading | None:
        start = len(self._begin)
        head = _HEAD.match(text, start)
        if head is None:
            return no_call(start, final=final or _BEGUN.match(text[start:]) is None)
        end = self._closing(text, head.end())
        if end < 0:
            return no_call(start, final=final)
        try:
            value, _ = self._value(text[head.end() : end].rstrip(), 0)
        except (ValueError, IndexError, RecursionError):
            return Reading(start)
        return Reading(end + len(self._end), (ToolCall.of(head[1], value),))

    def _closing(self, text: str, position: int) -> int:
        """Return the position of the closing markup outside of quotes; -1 before it has come."""
        while (end := text.find(self._end, position)) >= 0:
            quote = text.find(self._quote, position)
            if not 0 <= quote < end:
                return end
            closing = text.find(self._quote, quote + len(self._quote))
            if closing < 0:
                return -1
            position = closing + len(self._quote)
        return -1

    def _value(self, text: str, position: int) -> tuple[object, int]:
        """Return the value at `position`, and the position after it. Raises ValueError or IndexError for none."""
        if text.startswith(self._quote, position):
            start = position + len(self._quote)
            end = text.index(self._quote, start)
            return text[start:end], end + len(self._quote)
        if text[position] == "{":
            return self._pairs(text, position + 1)
        if text[position] == "[":
            return self._items(text, position + 1)
        plain = _PLAIN.match(text, position)
        if plain is None:
            raise ValueError("no value")
        if plain[0].strip() in PYTHON_CONSTANTS:  # as the template prints null
            return PYTHON_CONSTANTS[plain[0].strip()], plain.end()
        try:
            return json.loads(plain[0]), plain.end()
        except ValueError:
            return plain[0].strip().strip("\"'"), plain.end()

    def _pairs(self, text: str, position: int) -> tuple[dict[str, object], int]:
        """Return the object of the pairs from `position` on, and the position after it. Raises as `_value`."""
        pairs: dict[str, object] = {}
        while text[position] != "}":
            position = _skip(text, position, ",")
            if text.startswith(self._quote, position):
                key, position = self._value(text, position)
                colon = text.index(":", position)
            else:
                colon = text.index(":", position)
                key = text[position:colon].strip().strip("\"'")
            pairs[str(key)], position = self._value(text, _skip(text, colon + 1))
            position = _skip(text, position)
        return pairs, position + 1

    def _items(self, text: str, position: int) -> tuple[list[object], int]:
        """Return the list of the items from `position` on, and the position after it. Raises as `_value`."""
        items: list[object] = []
        while text[position] != "]":
            item, position = self._value(text, _skip(text, position, ","))
            items.append(item)
            position = _skip(text, position)
        return items, position + 1

    def cut_calls(self, text: str) -> tuple[ToolCall, ...]:
        # Cut within a text, after another value, or after a colon.
        whole = without_half(text, self._quote)
        quoted_text = f"{whole}{self._quote}}}{self._end}"
        other_value = f"{whole}}}{self._end}"
        no_value = f"{whole}{self._quote}{self._quote}}}{self._end}"
        closed = (quoted_text, other_value, no_value)
        return closed_calls(closed, partial(self.read, final=True), self._tools)

    def rules(self, tools: Sequence[Tool], literal: Callable[[str], str]) -> str:
        _, end, quote = map(literal, self._tokens)
        rules = [
            f"text: {quote} inner",
            *text_rules("inner", quote),
            "NUMBER: /-?(0|[1-9][0-9]{0,17})(\\.[0-9]{1,17})?/",
            "KEY: /[A-Za-z_][A-Za-z0-9_]{0,63}/",
            'any: text | NUMBER | "true" | "false" | "null" | "None" | pairs | items',
            'pairs: "{" (KEY ":" any ("," KEY ":" any)*)? "}"',
            'items: "[" (any ("," any)*)? "]"',
        ]
        for number, tool in enumerate(tools):
            rules += self._tool_rules(number, tool, quote)
        return "\n".join([f"rest: ({one_call(tools)}) {end}", *rules])

    def _tool_rules(self, number: int, tool: Tool, quote: str) -> list[str]:
        """Return the rules of one tool's call. quote: Lark of the mark around a text."""
        if tool.free:
            return [f'call{number}: "call:{tool.name}" pairs']
        values = _GemmaValueRules(quote, tool.parameters)
        pairs = values.pairs(str(number), tool.properties, tool.required, depth=0)
        return [f'call{number}: {quoted(f"call:{tool.name}{{")} {pairs} "}}"', *values.rules]


class _GemmaValueRules(ValueRules):
    """See `ValueRules`. quote: Lark of the mark around a text."""

    separator = ","
    of_kind: Mapping[str, str] = {
        "string": "text",
        "number": "NUMBER",
        "boolean": '"true" | "false"',
        "null": '"null" | "None"',
        "array": "items",
        "object": "pairs",
    }

    def __init__(self, quote: str, document: Schema) -> None:
        super().__init__(document)
        self._quote = quote

    def order(self, properties: Schema) -> Schema:
        return dict(sorted(properties.items(), key=lambda pair: pair[0].lower()))  # as the template does

    def pair(self, key: str, value: str) -> str:
        return f"{quoted(f'{key}:')} {value}"

    def object(self, pairs: str) -> str:
        return f'"{{" {pairs} "}}"'

    def item(self, value: str) -> str:
        return value

    def list(self, items: str) -> str:
        return f'"[" {items} "]"'

    def text(self, rule: str, schema: Schema) -> Sequence[str]:
        return [f"{rule}: {self._quote} inner{rule}", *text_rules(f"inner{rule}", self._quote, schema)]

    def scalar(self, value: str | float | None) -> str:
        if isinstance(value, str):
            return f"{self._quote} {quoted(value)} {self._quote}"
        return quoted(json.dumps(value))


def _skip(text: str, position: int, char: str = " ") -> int:
    """Return the first position from `position` on that is no space and not `char`."""
    while text[position].isspace() or text[position] == char:
        position += 1
    return position
