"""Gemma 4, and FunctionGemma: calls with keys without quotes, and texts between quotes of their own.

<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>
<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3}<end_function_call>
"""

import json
import re
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any

from headrace.models.text.tools.call import Reading, Tool, ToolCall, kind_of, kinds_of, referenced
from headrace.models.text.tools.cut import closed_calls, without_half
from headrace.models.text.tools.form import Marks, ToolForm, ordered_rules, quoted, schema_json
from headrace.models.text.tools.tagged import text_rules

MARKUP = ("<|tool_call>", "<tool_call|>", '<|"|>')
OLDER = ("<start_function_call>", "<end_function_call>", "<escape>")
_HEAD = re.compile(r"\s*call:([\w.:/-]+)(?=\{)")
_BEGUN = re.compile(r"\s*(?:c|ca|cal|call|call:[\w.:/-]*)?$")
_PLAIN = re.compile(r"[^,{}\[\]]+")


class Gemma(ToolForm):
    """See `ToolForm`. tools: by name. markup: MARKUP or OLDER."""

    separator = ""

    def __init__(self, marks: Marks, tools: Mapping[str, Tool], markup: Sequence[str] = MARKUP) -> None:
        self._tools = tools
        self._tokens = markup
        self.rule_begin = markup[0]
        self._begin, self._end, self._quote = map(marks, markup)
        self.begins = (self._begin,)

    def read(self, text: str, *, final: bool) -> Reading | None:
        start = len(self._begin)
        if (head := _HEAD.match(text, start)) is None:
            return None if not final and _BEGUN.match(text[start:]) else Reading(start)
        end = self._closing(text, head.end())
        if end < 0:
            return Reading(start) if final else None
        try:
            value, _ = self._value(text[head.end() : end].rstrip(), 0)
        except (ValueError, IndexError, RecursionError):
            return Reading(start)
        return Reading(end + len(self._end), (ToolCall(head[1], json.dumps(value, ensure_ascii=False)),))

    def _closing(self, text: str, place: int) -> int:
        """Return the place of the closing markup outside of quotes; -1 before it has come."""
        while (end := text.find(self._end, place)) >= 0:
            quote = text.find(self._quote, place)
            if not 0 <= quote < end:
                return end
            closing = text.find(self._quote, quote + len(self._quote))
            if closing < 0:
                return -1
            place = closing + len(self._quote)
        return -1

    def _value(self, text: str, place: int) -> tuple[Any, int]:
        """Return the value at `place`, and the place behind it. Raises ValueError or IndexError for none."""
        if text.startswith(self._quote, place):
            start = place + len(self._quote)
            end = text.index(self._quote, start)
            return text[start:end], end + len(self._quote)
        if text[place] == "{":
            return self._pairs(text, place + 1)
        if text[place] == "[":
            return self._items(text, place + 1)
        if (plain := _PLAIN.match(text, place)) is None:
            raise ValueError("no value")
        try:
            return json.loads(plain[0]), plain.end()
        except ValueError:
            return plain[0].strip().strip("\"'"), plain.end()

    def _pairs(self, text: str, place: int) -> tuple[dict[str, Any], int]:
        found: dict[str, Any] = {}
        while text[place] != "}":
            place = _behind(text, place, ",")
            if text.startswith(self._quote, place):
                key, place = self._value(text, place)
                colon = text.index(":", place)
            else:
                colon = text.index(":", place)
                key = text[place:colon].strip().strip("\"'")
            found[key], place = self._value(text, _behind(text, colon + 1))
            place = _behind(text, place)
        return found, place + 1

    def _items(self, text: str, place: int) -> tuple[list[Any], int]:
        found: list[Any] = []
        while text[place] != "]":
            item, place = self._value(text, _behind(text, place, ","))
            found.append(item)
            place = _behind(text, place)
        return found, place + 1

    def cut_calls(self, text: str) -> tuple[ToolCall, ...]:
        whole = without_half(text, self._quote)
        quoted_text = f"{whole}{self._quote}}}{self._end}"
        other_value = f"{whole}}}{self._end}"
        no_value = f"{whole}{self._quote}{self._quote}}}{self._end}"
        closed = (quoted_text, other_value, no_value)
        return closed_calls(closed, partial(self.read, final=True), self._tools)

    def rules(self, tools: Sequence[Tool], literal: Callable[[str], str]) -> str:
        quote = literal(self._tokens[2])
        rules = [
            f"text: {quote} inner",
            *text_rules("inner", quote),
            "NUMBER: /-?(0|[1-9][0-9]{0,17})(\\.[0-9]{1,17})?/",
            "KEY: /[A-Za-z_][A-Za-z0-9_]{0,63}/",
            'any: text | NUMBER | "true" | "false" | "null" | pairs | items',
            'pairs: "{" (KEY ":" any ("," KEY ":" any)*)? "}"',
            'items: "[" (any ("," any)*)? "]"',
        ]
        for number, tool in enumerate(tools):
            rules += self._tool_rules(number, tool, quote)
        names = " | ".join(f"call{number}" for number in range(len(tools)))
        return "\n".join([f"rest: ({names}) {literal(self._tokens[1])}", *rules])

    def _tool_rules(self, number: int, tool: Tool, quote: str) -> list[str]:
        if tool.free:
            return [f'call{number}: "call:{tool.name}" pairs']
        values = _ValueRules(quote, tool.parameters)
        pairs = values.pairs(str(number), tool.properties, tool.required, depth=0)
        return [f'call{number}: {quoted(f"call:{tool.name}{{")} {pairs} "}}"', *values.rules]


class _ValueRules:
    """Rules of values by their schemas. Objects and lists whose schema tells no more may have any values."""

    def __init__(self, quote: str, document: Mapping[str, Any]) -> None:
        """quote: Lark of the mark around a text. document: the schema that references point into."""
        self.rules: list[str] = []
        self._quote = quote
        self._document = document
        self._definitions = {key: document[key] for key in ("$defs", "definitions") if key in document}

    def pairs(self, name: str, properties: Mapping[str, Any], required: Container[str], depth: int) -> str:
        """Add the rules of an object's pairs; return the first of them."""
        written: dict[str, str] = {}
        # The template sorts the keys.
        for index, (key, schema) in enumerate(sorted(properties.items(), key=lambda pair: pair[0].lower())):
            value = f"value{name}x{index}"
            self._add(value, schema, depth)
            written[key] = f"{quoted(f'{key}:')} {value}"
        self.rules += ordered_rules(name, written, required, ",")
        return f"first{name}x0"

    def _add(self, rule: str, schema: Any, depth: int) -> None:
        """Add the rules of a value."""
        for _ in range(_MAX_DEPTH):
            if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
                break
            schema = referenced(schema["$ref"], self._document)
        about: Mapping[str, Any] = schema if isinstance(schema, Mapping) else {}
        kinds = kinds_of(about, self._document)
        choices = [about["const"]] if "const" in about else about.get("enum")
        union = about.get("anyOf") or about.get("oneOf")
        if isinstance(choices, list) and choices and all(kind_of(each) in _SCALARS for each in choices):
            self.rules.append(f"{rule}: {' | '.join(map(self._scalar, choices))}")
        elif isinstance(union, list) and "type" not in about and depth < _MAX_DEPTH:
            for number, each in enumerate(union):
                self._add(f"{rule}u{number}", each, depth + 1)
            self.rules.append(f"{rule}: {' | '.join(f'{rule}u{number}' for number in range(len(union)))}")
        elif kinds == {"string"}:
            self.rules += [f"{rule}: {self._quote} inner{rule}", *text_rules(f"inner{rule}", self._quote, about)]
        elif kinds <= _SCALARS - {"string"}:
            self.rules.append(f"{rule}: %json {schema_json({**about, **self._definitions})}")
        elif kinds == {"object"} and about.get("properties") and depth < _MAX_DEPTH:
            required = about.get("required")
            names = required if isinstance(required, list) else ()
            pairs = self.pairs(f"{rule}o", about["properties"], names, depth + 1)
            self.rules.append(f'{rule}: "{{" {pairs} "}}"')
        elif kinds == {"array"} and isinstance(about.get("items"), Mapping) and depth < _MAX_DEPTH:
            self._add_items(rule, about, depth)
        else:
            self.rules.append(f"{rule}: {' | '.join(_RULE_OF_KIND[kind] for kind in sorted(kinds))}")

    def _add_items(self, rule: str, about: Mapping[str, Any], depth: int) -> None:
        """Add the rules of a list."""
        self._add(f"{rule}i", about["items"], depth + 1)
        least = about.get("minItems", 0)
        most = about.get("maxItems")
        further = f"{{{max(0, least - 1)},{'' if most is None else max(0, most - 1)}}}"
        items = f'{rule}i ("," {rule}i){further}' if most != 0 else ""
        self.rules.append(f'{rule}: "[" {items if least else f"({items})?" if items else ""} "]"')

    def _scalar(self, value: Any) -> str:
        """Return a text, a number or a constant as Lark."""
        if isinstance(value, str):
            return f"{self._quote} {quoted(value)} {self._quote}"
        return quoted(json.dumps(value))


_MAX_DEPTH = 6  # of nested objects and lists; references from schema to schema
_SCALARS = frozenset(["string", "number", "boolean", "null"])
_RULE_OF_KIND = {
    "string": "text",
    "number": "NUMBER",
    "boolean": '"true" | "false"',
    "null": '"null"',
    "array": "items",
    "object": "pairs",
}


def _behind(text: str, place: int, char: str = " ") -> int:
    """Return the first place from `place` on that is no space and not `char`."""
    while text[place].isspace() or text[place] == char:
        place += 1
    return place
