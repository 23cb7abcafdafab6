"""LFM2: a list of calls as Python writes them.

<|tool_call_start|>[get_weather(city="Paris", days=3), time()]<|tool_call_end|>

Guards: tests/models/text/tools/test_forms.py and test_pythonic_history.py.
"""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

from headrace.models.text.template_text import TemplateText, concatenate
from headrace.models.text.tokenizer import Tokenizer
from headrace.models.text.tools.call import Reading, Tool, ToolCall
from headrace.models.text.tools.cut import closed_calls, whole_calls
from headrace.models.text.tools.form import MarkupTokens, ToolForm, one_call, ordered_rules, quoted, schema_json
from headrace.models.text.tools.json_value import UnfinishedError
from headrace.models.text.tools.tagged import python_constants

BEGIN = "<|tool_call_start|>"
END = "<|tool_call_end|>"
MARKUP = (BEGIN, END)
_OFFER = "<|tool_list_start|>"
_LONGEST = 1 << 20  # characters of calls that are parsed
_CONSTANTS = {"true": True, "false": False, "null": None}  # as models write them that think of JSON
# `[get_weather(`, or a beginning of it: the name, the bracket.
_LIST_BEGIN = re.compile(r"\s*\[\s*([\w.:/-]*)\s*(\(?)", re.ASCII)
# One call: its name, and the text between its brackets.
_CALL = re.compile(r"\s*(?P<name>[\w.:/-]+)\s*\((?P<arguments>.*)\)\s*", re.ASCII | re.DOTALL)
_PARAMETER = re.compile(r"[^\s=(),\"']+")  # a parameter's name


def fits(tokenizer: Tokenizer) -> bool:
    """Return whether a model's calls are in this form, by its vocabulary or the offer of its template."""
    return tokenizer.token_id(BEGIN) is not None or _OFFER in tokenizer.template_source


class Pythonic(ToolForm):
    """See `ToolForm`. tools: by name."""

    def __init__(self, marks: MarkupTokens, tools: Mapping[str, Tool]) -> None:
        self._tools = tools
        self.rule_begin = BEGIN
        self._begin, self._end = map(marks, MARKUP)
        self.begins = (self._begin,)

    def read(self, text: str, *, final: bool) -> Reading | None:
        start = len(self._begin)
        end = text.find(self._end, start)
        if end < 0 and not final:
            return None
        body = text[start:]
        after = len(text)
        if end >= 0:
            body = text[start:end]
            after = end + len(self._end)
        calls = _calls(body)
        return Reading(after, calls) if calls else Reading(start)

    def cut_calls(self, text: str) -> tuple[ToolCall, ...]:
        return cut_calls(text[len(self._begin) :], self._tools)

    def write(self, calls: Sequence[Mapping[str, Any]]) -> str:
        written = ", ".join(f"{call['name']}({_written(call['arguments'])})" for call in calls)
        begin, end = map(TemplateText, MARKUP)
        return concatenate((begin, f"[{written}]", end))

    def rules(self, tools: Sequence[Tool], literal: Callable[[str], str]) -> str:
        return list_rules(tools, literal(END), parallel=self.parallel)


def list_rules(tools: Sequence[Tool], end: str, *, parallel: bool) -> str:
    """Return the rules of a list of calls. end: Lark of the text after it."""
    alternatives = one_call(tools)
    more = f'(", " ({alternatives}))*' if parallel else ""
    rules = [f'rest: "[" ({alternatives}) {more} "]" {end}']
    for number, tool in enumerate(tools):
        rules += [f'call{number}: {quoted(f"{tool.name}(")} first{number}x0 ")"', *_argument_rules(number, tool)]
    return "\n".join(rules)


def leading_calls(text: str, start: int, tools: Mapping[str, Tool]) -> tuple[tuple[ToolCall, ...], int] | None:
    """Return the calls of a list at `start`, after spaces, and the position after it; None if there is none.

    All calls have to be of the tools, which are by name. Raises UnfinishedError for the beginning of such a list.
    """
    begin = _LIST_BEGIN.match(text, start)
    if begin is None or not any(name.startswith(begin[1]) for name in tools):
        return None
    if not begin[2]:  # the name goes on, or it ends the text
        if begin.end() < len(text):
            return None
        raise UnfinishedError
    end = _end_of_list(text, text.index("[", start))
    calls = _calls(text[start:end])
    if calls and all(call.name in tools for call in calls):
        return (calls, end)
    return None


def cut_calls(text: str, tools: Mapping[str, Tool]) -> tuple[ToolCall, ...]:
    """Return the calls of a list that a limit cut. tools: by name."""
    # Cut within a text, within a call, or after one.
    closed = (f'{text}")]', f"{text})]", f"{text}]")
    calls = closed_calls(closed, _read, tools)
    # The limit may cut the head of another call: those before it are whole.
    return calls or whole_calls(text[: text.rfind(")") + 1] + "]", _read, tools)


def _read(text: str) -> Reading:
    """Return the calls of a text that is a list of them. See `cut.ReadCall`."""
    return Reading(len(text), _calls(text))


def _end_of_list(text: str, start: int) -> int:
    """Return the position after the bracket that closes the one at `start`. Raises UnfinishedError if it is missing."""
    end = next((position for position, char in _outer_characters(text, start) if char in ")]}"), None)
    if end is not None:
        return end + 1
    raise UnfinishedError


def _written(arguments: Mapping[str, object]) -> str:
    """Return named arguments as Python writes them."""
    return ", ".join(f"{name}={_written_value(value)}" for name, value in arguments.items())


def _written_value(value: object) -> str:
    """Return a JSON value as Python, its texts in double quotes."""
    match value:
        case str():
            return json.dumps(value, ensure_ascii=False)
        case list():
            return f"[{', '.join(map(_written_value, value))}]"
        case dict():
            pairs = (f"{_written_value(key)}: {_written_value(item)}" for key, item in value.items())
            return f"{{{', '.join(pairs)}}}"
    return repr(value)


def _calls(body: str) -> tuple[ToolCall, ...]:
    """Return the calls in a list of Python's; none if it is something else.

    Names of tools and parameters need not be Python's: `list-tabs(from="x")`.
    """
    if len(body) > _LONGEST:
        return ()
    body = body.strip()
    items = body
    if body.startswith("[") and body.endswith("]"):
        items = body[1:-1]
    try:
        return tuple(map(_call, _parts(items)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()


def _parts(text: str) -> list[str]:
    """Return the parts of a text between its commas outside of quotes and brackets. An empty last one is left out."""
    parts: list[str] = []
    start = 0
    for position, char in _outer_characters(text):
        if char == ",":
            parts.append(text[start:position])
            start = position + 1
    if text[start:].strip():
        parts.append(text[start:])
    return parts


def _outer_characters(text: str, start: int = 0) -> Iterator[tuple[int, str]]:
    """Yield the positions and characters outside of quotes and brackets; of these the closing ones."""
    depth = 0
    quote = ""
    is_escaped = False
    for position in range(start, len(text)):
        char = text[position]
        if is_escaped:
            is_escaped = False
        elif quote:
            is_escaped = char == "\\"
            if char == quote:
                quote = ""
        elif char in "\"'":
            quote = char
        elif char in "([{":
            depth += 1
            continue
        elif char in ")]}":
            depth -= 1
        if not quote and depth == 0:
            yield position, char


def _call(text: str) -> ToolCall:
    """Return one call. Raises ValueError or SyntaxError for anything else."""
    head = _CALL.fullmatch(text)
    if head is None:
        raise ValueError("no call")
    arguments: dict[str, object] = {}
    for part in _parts(head["arguments"]):
        name, equals, value = part.partition("=")
        if not equals or not _PARAMETER.fullmatch(name.strip()):
            raise ValueError("no named argument")
        arguments[name.strip()] = _value(ast.parse(value.strip(), mode="eval").body)
    return ToolCall.of(head["name"], arguments)


def _value(node: ast.expr) -> object:
    """Return a literal of Python's or JSON's as a JSON value. Raises ValueError."""
    match node:
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)
            return {str(_value(key)): _value(value) for key, value in pairs if key is not None}
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None) or (isinstance(value, float) and not isfinite(value)):
        raise ValueError("no JSON value")
    return value


def _argument_rules(number: int, tool: Tool) -> list[str]:
    """Return rules of a tool's arguments, from `first{number}x0` on."""
    if tool.free:
        return [
            f'first{number}x0: (free{number} (", " free{number})*)?',
            f'free{number}: /[A-Za-z_][A-Za-z0-9_]{{0,63}}/ "=" any{number}',
            f"any{number}: %json {{}}",
        ]
    rules: list[str] = []
    written: dict[str, str] = {}
    for index, (name, schema) in enumerate(tool.properties.items()):
        value = f"value{number}x{index}"
        written[name] = f"{quoted(f'{name}=')} {value}"
        is_fixed = isinstance(schema, Mapping) and ("enum" in schema or "const" in schema)
        if is_fixed:
            constants = ""
        else:
            constants = python_constants(tool.kinds(name))
        rules += [f"{value}: json{value}{constants}", f"json{value}: %json {schema_json(tool.schema_of(name))}"]
    return [*ordered_rules(str(number), written, tool.required, ", "), *rules]
