"""The form of tool calls that a chat template writes, learned by rendering calls.

A template that shows earlier calls writes them as the model does. Calls with known names and arguments are rendered,
and the texts around these are the markup: before and after the name, the arguments, and further calls. Arguments are
one JSON object, or tagged values:

    <|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|>
    <minimax:tool_call><invoke name="get_weather"><parameter name="city">Paris</parameter></invoke>...

Numbers and identifiers that the template writes itself may have any value.

Guard: tests/models/text/tools/test_written.py.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from msgspec.structs import replace

from headrace.models.text.tools.call import Reading, Tool, ToolCall, no_call
from headrace.models.text.tools.cut import cut_tagged_calls
from headrace.models.text.tools.form import MarkupTokens, ToolForm, arguments_rules, one_call
from headrace.models.text.tools.json_value import UnfinishedError, leading_value
from headrace.models.text.tools.markup import Markup
from headrace.models.text.tools.tagged import tagged_call, tagged_rules

NAMES = ("probe_tool_x", "probe_tool_y")
KEYS = ("probe_key_x", "probe_key_y")
VALUES = ("probe_value_x", "probe_value_y")
# Identifiers of the calls in the rendered examples: `_ID` and `_LATER_ID` of `template_rules`.
IDS = ("a1b2c3d4e", "f5g6h7i8j")
_NAME = r"[A-Za-z0-9_.:/-]{1,128}?"  # of a tool, as a regular expression
_MAX_NAME = 128  # characters, as in `_NAME`
_SPECIAL = "<probe>\n&"  # a value that XML cannot have as it is
_CDATA_BEGIN = "<![CDATA["
_CDATA_END = "]]>"
# Parts of markup that differ from call to call: identifiers and numbers of calls.
_VARIABLE = re.compile(f"{IDS[0]}|{IDS[1]}|[0-9]+")
_VARIABLE_OR_SPACE = re.compile(f"{_VARIABLE.pattern}|\\s+")

# A value of each type but texts.
_SAMPLES: Mapping[str, object] = {"number": 3, "boolean": True, "null": None, "array": ["x"], "object": {"x": 3}}

Calls = Sequence[tuple[str, Mapping[str, object]]]
Write = Callable[[Calls], str | None]
"""Renders the calls of one message; returns the text that the model would have generated, without its end of turn."""


def learn(write: Write) -> Markup | None:
    """Return the markup of a template; None if it has none of the two shapes, or nothing marks the begin of a call."""
    # One call: the texts before and after the name.
    key = KEYS[0]
    value = VALUES[0]
    single = write([(NAMES[0], {key: value})])
    if single is None or single.count(NAMES[0]) != 1 or single.count(key) != 1 or single.count(value) != 1:
        return None
    begin, _, rest = single.partition(NAMES[0])
    if not _marks_a_call(begin) or key not in rest:
        return None

    # Around the arguments, and between two calls.
    two = write([(NAMES[0], {key: value}), (NAMES[1], {key: value})])
    json_text = re.search(r"\{\s*" + f'"{key}": "{value}"' + r"\s*\}", rest)
    if json_text is not None:
        middle = rest[: json_text.start()]
        end = rest[json_text.end() :]
        separator = _between(two, json_text[0], NAMES[1])
        return Markup(begin, middle, end, separator, is_indented="\n" in json_text[0])
    return _learn_tagged(write, begin, rest, two)


def _marks_a_call(begin: str) -> bool:
    """Return whether a text is markup that no ordinary answer begins with."""
    return len(begin.strip()) >= 3 and re.search(r"[<\[>|]", begin) is not None


def _learn_tagged(write: Write, begin: str, rest: str, two: str | None) -> Markup | None:
    """Return the markup of tagged arguments; None if calls have no such parts.

    A call with one argument, and what two arguments and none show of its parts:

        begin NAME middle key_begin KEY key_end VALUE value_end end
                                                VALUE value_end key_begin KEY        between two arguments
        begin NAME middle_if_empty end                                               without arguments

    write: writes calls by the model's template.
    begin: text before the name.
    rest: of a call with one argument, the text after the name.
    two: the text of two calls; None if the template refuses them.
    """
    key = KEYS[0]
    value = VALUES[0]
    head, _, after_key = rest.partition(key)
    key_end, _, tail = after_key.partition(value)
    between = _between(write([(NAMES[0], dict(zip(KEYS, VALUES, strict=True)))]), value, KEYS[1])
    without_arguments = write([(NAMES[0], {})])
    if not key_end or not tail or between is None or without_arguments is None:
        return None
    # The texts before a first and a second key end alike, by `key_begin`. What differs is `middle` and `value_end`.
    key_begin = _from_bracket(_common_suffix(head, between))
    middle = head.removesuffix(key_begin)
    value_end = between.removesuffix(key_begin)
    if not key_begin or not value_end or not tail.startswith(value_end):
        return None
    end = tail.removeprefix(value_end)
    # Templates may leave out white space in a call without arguments, and nothing else.
    empty_begin = f"{begin}{NAMES[0]}"
    middle_if_empty = without_arguments.removeprefix(empty_begin).removesuffix(end)
    is_whole = without_arguments == f"{empty_begin}{middle_if_empty}{end}"
    if not is_whole or middle_if_empty.strip() != middle.strip():
        return None
    special = write([(NAMES[0], {key: _SPECIAL})])
    return Markup(
        begin=begin,
        middle=middle,
        end=end,
        separator=_between(two, value + value_end, NAMES[1]),
        key_begin=key_begin,
        key_end=key_end,
        value_end=value_end,
        typed_key_ends=_learn_typed_key_ends(write, key_end, value_end),
        middle_if_empty=middle_if_empty,
        has_cdata=special is not None and f"{_CDATA_BEGIN}{_SPECIAL}{_CDATA_END}" in special,
    )


def _learn_typed_key_ends(write: Write, key_end: str, value_end: str) -> dict[str, str]:
    """Return the texts between a key and a value that name the type of the value, where they are not `key_end`."""
    key_ends: dict[str, str] = {}
    for kind, sample in _SAMPLES.items():
        text = write([(NAMES[0], {KEYS[0]: sample})])
        written = _between(text, KEYS[0], value_end)
        if written is None or written.startswith(key_end):
            continue
        value = json.dumps(sample)
        if written.endswith(value):
            key_ends[kind] = written.removesuffix(value)
    return key_ends


def _between(text: str | None, before: str, after: str) -> str | None:
    """Return the text between the first `before` and the next `after`; None if they are not there."""
    if text is None:
        return None
    _, separator, rest = text.partition(before)
    between, end, _ = rest.partition(after)
    if not separator or not end:
        return None
    return between


def _common_suffix(first: str, other: str) -> str:
    """Return the longest end that two texts share."""
    length = 0
    while length < min(len(first), len(other)) and first[-1 - length] == other[-1 - length]:
        length += 1
    return first[len(first) - length :]


def _from_bracket(text: str) -> str:
    """Return a text from its first opening bracket on: what is before it ends the tag before."""
    bracket = re.search(r"[<\[]", text)
    if bracket is None:
        return text
    return text[bracket.start() :]


class Written(ToolForm):
    """Calls in a learned form.

    marks: returns a text with the characters that stand for control tokens in an answer's text.
    tools: by name.
    markup: as the template writes it.
    """

    def __init__(self, marks: MarkupTokens, tools: Mapping[str, Tool], markup: Markup) -> None:
        self.markup: Markup = markup
        self._tools = tools
        self.names = tools.keys()
        self._marks = marks

        # The begin of calls. `rule_begin` and `_rest_of_begin` are for the grammar, and have control tokens as the
        # template writes them. `begins` and all patterns are for answers, where `marks` has replaced these tokens.
        # `fixed` is the same in all calls: it ends before the first number, identifier or space. If it is no markup by
        # itself, `rule_begin` stays "", and only forced calls have a grammar.
        begin = markup.begin.lstrip()
        fixed = _VARIABLE_OR_SPACE.split(begin)[0]
        if _marks_a_call(fixed):
            self.rule_begin = fixed
        self._rest_of_begin = begin.removeprefix(self.rule_begin)
        self.begins = (marks(fixed),)

        # Patterns of the texts around names and arguments, and `begins`: the texts before the first and a later name.
        self._begin = _pattern(marks(begin))
        self._middle = _pattern(marks(markup.middle))
        self._end = _pattern(marks(markup.end))
        self._separator: str | None = None
        self._separates_by_end = False
        begins = [self._begin]
        if markup.separator is not None:
            self._separator = _pattern(marks(markup.separator))
            # Each call has its own end, so the separator begins with an end. `read` then cannot tell at an end whether
            # a further call follows, and waits for more text.
            self._separates_by_end = markup.separator.startswith(markup.end.rstrip())
            begins.append(self._separator)
        # In characters. `read` does not wait for the rest of a head, or of an end, in a text as long as this.
        self._max_head = sum(map(len, markup.texts)) + _MAX_NAME

        # `_name`: a tool's name and the text after it. The arguments follow these: without that condition, a name would
        # end before an empty `middle`. `head` also has the text before the name.
        self._parameter: re.Pattern[str] | None = None  # None: arguments are JSON
        if markup.key_begin is None:
            self._name = f"({_NAME}){self._middle}(?=\\s*{{)"
            self.head = re.compile(f"(?:{'|'.join(begins)}){self._name}")
        else:
            # After a name stands the first key, or without arguments the end or another call. The same texts
            # stand after `value_end`.
            after_name = [_pattern(marks(markup.key_begin)), self._end, *begins[1:]]
            self._name = f"({_NAME}){self._middle}(?={'|'.join(after_name)})"
            # The first pattern ends a value at the first `value_end`. The second wants one of these texts after it, as
            # a value may contain its own end. A value with `_call_begin`, the last tag before a name, would take in
            # another call: `_pairs` then uses the first pattern.
            parameter = self._parameter_pattern(marks)
            self._parameter = re.compile(parameter)
            self._parameter_before_tag = re.compile(f"{parameter}(?={'|'.join(after_name)})")
            self._call_begin = re.compile(_pattern(marks(begin[max(begin.rfind("<"), 0) :])))
        # Text before a value that is a text, for markup that names types. No name of another type matches.
        self._before_text = re.compile(_pattern(marks(markup.key_end), any_type=False))

    def _parameter_pattern(self, marks: MarkupTokens) -> str:
        """Return the pattern of a parameter: its name, the text that names the value's type, the value."""
        markup = self.markup
        before = _pattern(marks(markup.key_begin or ""))
        after = _pattern(marks(markup.value_end))
        middle = "|".join(_pattern(marks(text)) for text in (markup.key_end, *markup.typed_key_ends.values()))
        return f"{before}([^<>\\n]{{1,128}}?)({middle})((?s:.*?)){after}"

    def read(self, text: str, *, final: bool) -> Reading | None:
        """See `ToolForm`. A call of an unknown tool is text, and so is one that is incomplete at an answer's end.

        `head` is the next call's, once its name has been read; None after the last call of a known tool.
        """
        head = self._match(self._begin + self._name, text, 0)
        if head is None:
            return no_call(len(self.begins[0]), final=final or len(text) >= self._max_head)
        if head[1] not in self._tools:
            return Reading(head.end())
        calls: list[ToolCall] = []
        position = 0  # after the last call's arguments
        while head is not None:
            arguments = self._arguments(text, head, final=final)
            if arguments is None:
                break
            call, position = arguments
            calls.append(call)
            head = self._next_head(text, position)
            if head is not None and head[1] not in self._tools:
                head = None
        if head is not None and not final:
            return None  # the arguments of a call are incomplete
        if not calls:
            return Reading(len(self.begins[0]))
        rest = text[position:]
        end = self._match(self._end, rest, 0)
        if end is not None and (final or not self._may_become_head(rest)):
            return Reading(position + end.end(), tuple(calls))
        if not final and len(rest) < self._max_head:
            return None  # the end or the next head may be incomplete
        if self._is_beginning_of_end(rest):
            return Reading(len(text), tuple(calls))
        return Reading(position, tuple(calls))

    def _next_head(self, text: str, position: int) -> re.Match[str] | None:
        """Return the head of another call after the arguments of one."""
        if self._separator is None:
            return None
        return self._match(self._separator + self._name, text, position)

    def _may_become_head(self, rest: str) -> bool:
        """Return whether the text after a call, which begins like the end, may become the head of another call."""
        if not self._separates_by_end or len(rest) >= self._max_head:
            return False
        return self._match(f"{self._end}\\s*$", rest, 0) is not None

    def _is_beginning_of_end(self, rest: str) -> bool:
        """Return whether a text after a call is a beginning of the end, as in an answer that was cut there."""
        end = "".join(self._marks(self.markup.end).split())
        return end.startswith("".join(rest.split()))

    def _match(self, pattern: str, text: str, position: int) -> re.Match[str] | None:
        """Return the match of a pattern at a position. `re` keeps the compiled ones."""
        return re.compile(pattern).match(text, position)

    def _arguments(self, text: str, head: re.Match[str], *, final: bool) -> tuple[ToolCall, int] | None:
        """Return the call and the position after its arguments; None while they are incomplete.

        Tagged arguments are whole once the end or another call follows. In an answer that has ended, those that were
        read count.
        """
        name = head[1]
        position = head.end()
        if self._parameter is None:
            try:
                value, end = leading_value(text, position)
            except (UnfinishedError, ValueError):
                return None
            return ToolCall.of(name, value), end
        pairs: list[tuple[str, str]] = []
        texts: set[str] = set()
        for pair in self._pairs(self._parameter, text, position):
            key, before_value, value = pair.groups()
            if self.markup.has_cdata:
                value = _without_cdata(value)
            pairs.append((key, value))
            if self.markup.typed_key_ends and self._before_text.fullmatch(before_value):
                texts.add(key)
            position = pair.end()
        is_whole = self._match(self._end, text, position) or self._next_head(text, position)
        if is_whole is None and not final:
            return None
        return tagged_call(name, pairs, self._tools, texts), position

    def _pairs(self, parameter: re.Pattern[str], text: str, position: int) -> Iterator[re.Match[str]]:
        """Yield the parameters that follow one another from `position` on.

        A value may have its own end in it, and then ends before another tag of the call. Where that would take in the
        beginning of another call, markup is missing: the value ends at the first end.
        """
        while True:
            match = self._parameter_before_tag.match(text, position)
            if match is None or self._call_begin.search(match[3]):
                match = parameter.match(text, position)
            if match is None:
                return
            yield match
            position = match.end()

    def cut_calls(self, text: str) -> tuple[ToolCall, ...]:
        if self.head is not None:  # arguments are JSON
            return super().cut_calls(text)
        return cut_tagged_calls(text, partial(self.read, final=True), self.markup.mapped(self._marks), self._tools)

    def rules(self, tools: Sequence[Tool], literal: Callable[[str], str]) -> str:
        markup = self.markup
        # `rule_begin` has been written before `rest` begins.
        begin = _grammar(self._rest_of_begin, literal)
        if markup.key_begin is None:
            middle = _grammar(markup.middle, literal)
            calls = [f"call{n}: {literal(tool.name)} {middle} arguments{n}" for n, tool in enumerate(tools)]
            lines = [*calls, *arguments_rules(tools, any_space=markup.is_indented)]
        else:
            lines = self._tagged_rules(tools, literal)
        call = f"({one_call(tools)})"
        more = ""
        if self.parallel and markup.separator is not None:
            more = f"({_grammar(markup.separator, literal)} {call})*"
        return "\n".join([f"rest: {begin} {call} {more} {_grammar(markup.end, literal)}", *lines])

    def _tagged_rules(self, tools: Sequence[Tool], literal: Callable[[str], str]) -> list[str]:
        """Return the rules of one call of each tool with tagged arguments, `call0` and the next ones."""
        lark = self.markup.mapped(lambda text: _grammar(text, literal))
        # `text_rules` reads it as a literal or a control token: no number in it may differ.
        lark = replace(lark, value_end=literal(self.markup.value_end))
        return tagged_rules(lark, tools)


def _without_cdata(value: str) -> str:
    """Return a value without XML's marks around a text with special characters."""
    if not value.startswith(_CDATA_BEGIN) or not value.endswith(_CDATA_END):
        return value
    return value[len(_CDATA_BEGIN) : -len(_CDATA_END)]


def _pattern(text: str, *, any_type: bool = True) -> str:
    """Return a regular expression of markup: any numbers, any identifiers, spaces of any length.

    any_type: the name of a value's type may be another one, as in Kimi K3 and DeepSeek.
    """
    parts: list[str] = []
    position = 0
    for match in _VARIABLE_OR_SPACE.finditer(text):
        parts.append(re.escape(text[position : match.start()]))
        parts.append(r"\s*" if match[0].isspace() else r"[A-Za-z0-9_-]+")
        position = match.end()
    pattern = "".join([*parts, re.escape(text[position:])])
    if not any_type:
        return pattern
    return pattern.replace('type="string"', 'type="[a-z]+"').replace('string="true"', 'string="(?:true|false)"')


def _grammar(text: str, literal: Callable[[str], str]) -> str:
    """Return markup as Lark. Numbers have up to three digits, and identifiers the form of `IDS`."""
    parts: list[str] = []
    position = 0
    for match in _VARIABLE.finditer(text):
        parts.append(literal(text[position : match.start()]))
        parts.append("/[0-9]{1,3}/" if match[0].isdigit() else "/[a-z0-9]{9}/")
        position = match.end()
    parts.append(literal(text[position:]))
    return " ".join(filter(None, parts))
