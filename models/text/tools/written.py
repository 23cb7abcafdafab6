"""The form of tool calls that a chat template writes, learned by rendering calls.

A template that shows earlier calls writes them as the model does. Calls with known names and arguments are rendered,
and the texts around these are the markup: before and after the name, the arguments, and further calls. Arguments are
one JSON object, or tagged values:

    <|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|>
    <minimax:tool_call><invoke name="get_weather"><parameter name="city">Paris</parameter></invoke>...

Numbers and identifiers that the template writes itself may have any value.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from headrace.models.text.tools.call import Reading, Tool, ToolCall
from headrace.models.text.tools.form import Marks, ToolForm, arguments_rule
from headrace.models.text.tools.json_value import UnfinishedError, leading_value
from headrace.models.text.tools.tagged import call_rules, tagged_call

NAMES = ("probe_tool_x", "probe_tool_y")
KEYS = ("probe_key_x", "probe_key_y")
VALUES = ("probe_value_x", "probe_value_y")
IDS = ("a1b2c3d4e", "f5g6h7i8j")
_NAME = r"[A-Za-z0-9_.:/-]{1,128}?"
_MAX_NAME = 128

Calls = Sequence[tuple[str, Mapping[str, str]]]
Write = Callable[[Calls], str | None]
"""Renders the calls of one message; returns the text that the model would have generated, without its end of turn."""


@dataclass(frozen=True, slots=True)
class Markup:
    """Texts around the parts of calls.

    begin: before the first name. middle: between a name and its arguments. end: after the last arguments.
    separator: between the arguments of a call and the name of the next one; None: one call a message. key_begin,
    key_end, value_end: around a key and after a value of tagged arguments; None for a JSON object.
    """

    begin: str
    middle: str
    end: str
    separator: str | None
    key_begin: str | None = None
    key_end: str = ""
    value_end: str = ""

    @property
    def texts(self) -> list[str]:
        """All texts."""
        parts = (self.begin, self.middle, self.end, self.separator, self.key_begin, self.key_end, self.value_end)
        return [part for part in parts if part]


def learn(write: Write) -> Markup | None:
    """Return the markup of a template; None if it has none of the two shapes, or nothing marks the begin of a call."""
    key, value = KEYS[0], VALUES[0]
    one = write([(NAMES[0], {key: value})])
    if one is None or one.count(NAMES[0]) != 1 or one.count(key) != 1 or one.count(value) != 1:
        return None
    begin, _, rest = one.partition(NAMES[0])
    if not _marks_a_call(begin) or key not in rest:
        return None
    two = write([(NAMES[0], {key: value}), (NAMES[1], {key: value})])
    json_text = re.search(r"\{\s*" + f'"{key}": "{value}"' + r"\s*\}", rest)
    if json_text is not None:
        middle, end = rest[: json_text.start()], rest[json_text.end() :]
        separator = _between(two, json_text[0], NAMES[1])
        return Markup(begin, middle, end, separator)
    return _learn_tagged(write, begin, rest, two)


def _marks_a_call(begin: str) -> bool:
    """Return whether a text is markup that no ordinary answer begins with."""
    return len(begin.strip()) >= 3 and re.search(r"[<\[>|]", begin) is not None


def _learn_tagged(write: Write, begin: str, rest: str, two: str | None) -> Markup | None:
    key, value = KEYS[0], VALUES[0]
    head, _, behind = rest.partition(key)
    key_end, found, tail = behind.partition(value)
    both = write([(NAMES[0], dict(zip(KEYS, VALUES, strict=True)))])
    none = write([(NAMES[0], {})])
    between = _between(both, value, KEYS[1])
    if not found or not key_end or not tail or between is None or none is None:
        return None
    key_begin = _common_suffix(head, between)
    value_end = between.removesuffix(key_begin)
    middle = head.removesuffix(key_begin)
    if not key_begin or not value_end or not tail.startswith(value_end):
        return None
    end = tail.removeprefix(value_end)
    if none != f"{begin}{NAMES[0]}{middle}{end}":
        return None
    separator = _between(two, value + value_end, NAMES[1])
    return Markup(begin, middle, end, separator, key_begin, key_end, value_end)


def _between(text: str | None, before: str, after: str) -> str | None:
    """Return the text between the first `before` and the next `after`; None if they are not there."""
    if text is None:
        return None
    _, found, rest = text.partition(before)
    between, also, _ = rest.partition(after)
    return between if found and also else None


def _common_suffix(one: str, other: str) -> str:
    length = 0
    while length < min(len(one), len(other)) and one[-1 - length] == other[-1 - length]:
        length += 1
    return one[len(one) - length :]


class Written(ToolForm):
    """Calls in a learned form. tools: by name."""

    def __init__(self, marks: Marks, tools: Mapping[str, Tool], markup: Markup) -> None:
        self._markup = markup
        self._tools = tools
        begin = markup.begin.lstrip()
        fixed = _VARIABLE_OR_SPACE.split(begin)[0]
        self.rule_begin = fixed if _marks_a_call(fixed) else ""
        self._rest_of_begin = begin.removeprefix(self.rule_begin)
        self.begins = (marks(fixed),)
        self._begin = _pattern(marks(begin))
        self._middle = _pattern(marks(markup.middle))
        self._separator = None if markup.separator is None else _pattern(marks(markup.separator))
        self._end = _pattern(marks(markup.end))
        # Each call has an end of its own, so the end of one may be the beginning of the separator.
        self._separates_by_end = markup.separator is not None and markup.separator.startswith(markup.end.rstrip())
        self._longest = sum(map(len, markup.texts)) + _MAX_NAME
        starts = self._begin if self._separator is None else f"(?:{self._begin}|{self._separator})"
        is_json = markup.key_begin is None
        # After a name come the arguments: without the condition, a name would end before an empty `middle`.
        following = r"\s*{" if is_json else f"{_pattern(marks(markup.key_begin or ''))}|{self._end}"
        self._head = f"({_NAME}){self._middle}(?={following})"
        self.head = re.compile(f"{starts}{self._head}") if is_json else None
        self._parameters = None if is_json else self._parameter_pattern(marks)

    def _parameter_pattern(self, marks: Marks) -> re.Pattern[str]:
        texts = (self._markup.key_begin or "", self._markup.key_end, self._markup.value_end)
        before, middle, after = (_pattern(marks(text)) for text in texts)
        return re.compile(f"{before}([^<>\\n]{{1,128}}?){middle}((?s:.*?)){after}")

    def read(self, text: str, *, final: bool) -> Reading | None:
        calls: list[ToolCall] = []
        head = self._match(self._begin + self._head, text, 0)
        if head is None:
            return None if not final and len(text) < self._longest else Reading(len(self.begins[0]))
        if head[1] not in self._tools:
            return Reading(head.end())
        position = 0
        while head is not None:
            arguments = self._arguments(text, head, final=final)
            if arguments is None:
                break
            call, position = arguments
            calls.append(call)
            head = self._next_head(text, position)
        if head is not None and not final:
            return None  # within the arguments of a call
        end = self._match(self._end, text, position) if calls else None
        if end is not None and (final or not self._may_go_on(text[position:])):
            return Reading(end.end(), tuple(calls))
        if not final and len(text) - position < self._longest:
            return None
        return Reading(position or len(self.begins[0]), tuple(calls))

    def _next_head(self, text: str, position: int) -> re.Match[str] | None:
        """Return the head of another call after the arguments of one."""
        return None if self._separator is None else self._match(self._separator + self._head, text, position)

    def _match(self, pattern: str, text: str, position: int) -> re.Match[str] | None:
        return re.compile(pattern).match(text, position)

    def _may_go_on(self, rest: str) -> bool:
        """Return whether the text after a call, which begins like the end, may become the head of another call."""
        if not self._separates_by_end:
            return False
        return len(rest) < self._longest and self._match(f"{self._end}\\s*$", rest, 0) is not None

    def _arguments(self, text: str, head: re.Match[str], *, final: bool) -> tuple[ToolCall, int] | None:
        """Return the call and the place after its arguments; None while they are incomplete."""
        name, position = head[1], head.end()
        if self._parameters is None:
            try:
                value, end = leading_value(text, position)
            except (UnfinishedError, ValueError):
                return None
            return ToolCall(name, json.dumps(value, ensure_ascii=False)), end
        pairs: list[tuple[str, str]] = []
        while (pair := self._parameters.match(text, position)) is not None:
            pairs.append((pair[1], _without_quotes(pair[2])))
            position = pair.end()
        is_whole = self._match(self._end, text, position) or self._next_head(text, position)
        if is_whole is None and not final:
            return None
        return tagged_call(name, pairs, self._tools), position

    def rules(self, tools: Sequence[Tool], literal: Callable[[str], str]) -> str:
        markup = self._markup
        begin = _grammar(self._rest_of_begin, literal)
        if markup.key_begin is None:
            middle = _grammar(markup.middle, literal)
            calls = [f"call{n}: {literal(tool.name)} {middle} arguments{n}" for n, tool in enumerate(tools)]
            names = " | ".join(f"call{n}" for n in range(len(tools)))
            lines = [*calls, *(arguments_rule(n, tool) for n, tool in enumerate(tools))]
        else:
            before = f"{markup.key_begin}%s{markup.key_end}".replace(_IS_TEXT, 'string="%t"')
            names, lines = call_rules(tools, f"%s{markup.middle}", before, markup.value_end, literal)
        more = ""
        if self.parallel and markup.separator is not None:
            more = f"({_grammar(markup.separator, literal)} ({names}))*"
        return "\n".join([f"rest: {begin} ({names}) {more} {_grammar(markup.end, literal)}", *lines])


def _without_quotes(value: str) -> str:
    """Return a value without XML's marks around a text with special characters."""
    begin, end = "<![CDATA[", "]]>"
    is_quoted = value.startswith(begin) and value.endswith(end)
    return value[len(begin) : -len(end)] if is_quoted else value


_IS_TEXT = 'string="true"'
_VARIABLE = re.compile(f"{IDS[0]}|{IDS[1]}|[0-9]+")
_VARIABLE_OR_SPACE = re.compile(f"{_VARIABLE.pattern}|\\s+")


def _pattern(text: str) -> str:
    """Return a regular expression of markup: any numbers, any identifiers, spaces of any length."""
    parts: list[str] = []
    position = 0
    for found in _VARIABLE_OR_SPACE.finditer(text):
        parts.append(re.escape(text[position : found.start()]))
        parts.append(r"\s*" if found[0].isspace() else r"[A-Za-z0-9_-]+")
        position = found.end()
    pattern = "".join([*parts, re.escape(text[position:])])
    # Types of values, which Kimi K3 and DeepSeek write.
    return pattern.replace('type="string"', 'type="[a-z]+"').replace(_IS_TEXT, 'string="(?:true|false)"')


def _grammar(text: str, literal: Callable[[str], str]) -> str:
    """Return markup as Lark."""
    parts: list[str] = []
    position = 0
    for found in _VARIABLE.finditer(text):
        parts.append(literal(text[position : found.start()]) if found.start() > position else "")
        parts.append("/[0-9]{1,3}/" if found[0].isdigit() else "/[a-z0-9]{9}/")
        position = found.end()
    parts.append(literal(text[position:]) if position < len(text) else "")
    return " ".join(filter(None, parts))
