"""LFM2: a list of calls as Python writes them.

<|tool_call_start|>[get_weather(city="Paris", days=3), time()]<|tool_call_end|>
"""

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any

from headrace.models.text.template_text import TemplateText, concatenate
from headrace.models.text.tokenizer import Tokenizer
from headrace.models.text.tools.call import Reading, Tool, ToolCall
from headrace.models.text.tools.cut import closed_calls, whole_calls
from headrace.models.text.tools.form import Marks, ToolForm, ordered_rules, quoted, schema_json
from headrace.models.text.tools.json_value import UnfinishedError

MARKUP = ("<|tool_call_start|>", "<|tool_call_end|>")
_OFFER = "<|tool_list_start|>"
_LONGEST = 1 << 20  # characters of calls that are parsed
_CONSTANTS = {"true": True, "false": False, "null": None}  # as models write them that think of JSON
_LIST_BEGIN = re.compile(r"\s*\[\s*([A-Za-z_][\w.]*|)\s*(\(?)", re.ASCII)
_NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", re.ASCII)


def fits(tokenizer: Tokenizer) -> bool:
    """Return whether a model's calls are in this form, by its vocabulary or the offer of its template."""
    return tokenizer.token_id(MARKUP[0]) is not None or _OFFER in tokenizer.template_source


class Pythonic(ToolForm):
    """See `ToolForm`. tools: by name."""

    def __init__(self, marks: Marks, tools: Mapping[str, Tool]) -> None:
        self._tools = tools
        self.rule_begin = MARKUP[0]
        self._begin, self._end = map(marks, MARKUP)
        self.begins = (self._begin,)

    def read(self, text: str, *, final: bool) -> Reading | None:
        start = len(self._begin)
        end = text.find(self._end, start)
        if end < 0 and not final:
            return None
        body = text[start:] if end < 0 else text[start:end]
        calls = _calls(body)
        return Reading(len(text) if end < 0 else end + len(self._end), calls) if calls else Reading(start)

    def cut_calls(self, text: str) -> tuple[ToolCall, ...]:
        return cut_calls(text[len(self._begin) :], self._tools)

    def write(self, calls: Sequence[Mapping[str, Any]]) -> str:
        written = ", ".join(f"{call['name']}({_written(call['arguments'])})" for call in calls)
        begin, end = map(TemplateText, MARKUP)
        return concatenate((begin, f"[{written}]", end))

    def rules(self, tools: Sequence[Tool], literal: Callable[[str], str]) -> str:
        return list_rules(tools, literal(MARKUP[1]), parallel=self.parallel)


def list_rules(tools: Sequence[Tool], end: str, *, parallel: bool) -> str:
    """Return the rules of a list of calls. end: Lark of the text after it."""
    one = " | ".join(f"call{number}" for number in range(len(tools)))
    more = f'(", " ({one}))*' if parallel else ""
    rules = [f'rest: "[" ({one}) {more} "]" {end}']
    for number, tool in enumerate(tools):
        rules += [f'call{number}: {quoted(f"{tool.name}(")} first{number}x0 ")"', *_argument_rules(number, tool)]
    return "\n".join(rules)


def leading_calls(text: str, start: int, tools: Mapping[str, Tool]) -> tuple[tuple[ToolCall, ...], int] | None:
    """Return the calls of a list at `start`, after spaces, and the place after it; None if there is none.

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
    return (calls, end) if calls and all(call.name in tools for call in calls) else None


def cut_calls(text: str, tools: Mapping[str, Tool]) -> tuple[ToolCall, ...]:
    """Return the calls of a list that a limit cut. tools: by name."""
    closed = (f'{text}")]', f"{text})]", f"{text}]")
    calls = closed_calls(closed, _read, tools)
    # The limit may cut the head of another call: those before it are whole.
    return calls or whole_calls(text[: text.rfind(")") + 1] + "]", _read, tools)


def _read(text: str) -> Reading:
    return Reading(len(text), _calls(text))


def _end_of_list(text: str, start: int) -> int:
    """Return the place after the bracket that closes the one at `start`. Raises UnfinishedError before it has come."""
    depth = 0
    quote = ""
    is_escaped = False
    for position in range(start, len(text)):
        char = text[position]
        if is_escaped:
            is_escaped = False
        elif quote:
            is_escaped = char == "\\"
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
            if depth == 0:
                return position + 1
    raise UnfinishedError


def _written(arguments: Mapping[str, Any]) -> str:
    values = {
        name: json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
        for name, value in arguments.items()
    }
    return ", ".join(f"{name}={value}" for name, value in values.items())


def _calls(body: str) -> tuple[ToolCall, ...]:
    """Return the calls in a list of Python's; none if it is something else."""
    if len(body) > _LONGEST:
        return ()
    try:
        tree = ast.parse(body.strip(), mode="eval").body
        return tuple(map(_call, tree.elts if isinstance(tree, ast.List) else [tree]))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()


def _call(node: ast.expr) -> ToolCall:
    """Return one call. Raises ValueError for anything else."""
    if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
        raise ValueError("no call with named arguments")
    name = ast.unparse(node.func)
    if _NAME.fullmatch(name) is None:
        raise ValueError("no name")
    arguments = {str(keyword.arg): _value(keyword.value) for keyword in node.keywords}
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _value(node: ast.expr) -> Any:
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
        if isinstance(schema, Mapping) and schema.get("type") == "boolean" and "enum" not in schema:
            rules.append(f'{value}: "True" | "False" | "true" | "false"')
        else:
            rules.append(f"{value}: %json {schema_json(tool.schema_of(name))}")
    return [*ordered_rules(str(number), written, tool.required, ", "), *rules]
