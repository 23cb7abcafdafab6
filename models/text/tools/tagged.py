"""Parameters of a call as tagged plain text: the arguments they make, and the rules of their values."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from headrace.models.text.tools.call import Tool, ToolCall, typed_value
from headrace.models.text.tools.form import quoted, schema_json


def tagged_call(name: str, pairs: Iterable[tuple[str, str]], tools: Mapping[str, Tool]) -> ToolCall:
    """Return the call of a name and its parameters as text; the tool's schema says which are JSON."""
    tool = tools.get(name)
    arguments = {key: typed_value(tool, key, value) for key, value in pairs}
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def call_rules(
    tools: Sequence[Tool], head: str, before: str, after: str, literal: Callable[[str], str], close: str = ""
) -> tuple[str, list[str]]:
    """Return the choice of one call of any tool, and the rules of all: a head, then parameters.

    head: text before the parameters, with %s for the tool's name. before: text before a value, with %s for the
    parameter's name, and %t for `true` if it is a text, else `false`. after: text behind a value, close: behind all of
    them. literal: see `ToolForm`.
    """
    rules: list[str] = []
    for number, tool in enumerate(tools):
        rules.append(f"call{number}: {literal(head % tool.name)} parameters{number} {literal(close) if close else ''}")
        rules += _parameter_rules(number, tool, before, after, literal)
    return " | ".join(f"call{number}" for number in range(len(tools))), rules


def _parameter_rules(number: int, tool: Tool, before: str, after: str, literal: Callable[[str], str]) -> list[str]:
    """Return the rules of `parameters{number}`: the tool's parameters in order, required ones always."""
    if tool.free:
        name, value = f"name{number}", f"value{number}"
        head, _, tail = before.replace("%t", "true").partition("%s")
        plain = f"{literal(head)} {name} {literal(tail)} {value}"
        return [
            f"parameters{number}: ({plain})*",
            f"{name}: /[A-Za-z_][A-Za-z0-9_-]{{0,63}}/",
            *text_rules(value, literal(after)),
        ]
    names: list[str] = []
    rules: list[str] = []
    for place, (name, schema) in enumerate(tool.properties.items()):
        rule, value = f"parameter{number}x{place}", f"value{number}x{place}"
        names.append(rule if tool.needs(name) else f"{rule}?")
        head = before.replace("%s", name).replace("%t", str(tool.is_text(name)).lower())
        rules += [f"{rule}: {literal(head)} {value}", *_value(value, tool, name, schema, literal(after))]
    return [f"parameters{number}: {' '.join(names)}", *rules]


def _value(rule: str, tool: Tool, name: str, schema: Any, after: str) -> list[str]:
    """Return the rules of one value and what follows it, as Lark."""
    choices = schema.get("enum") if isinstance(schema, Mapping) else None
    if tool.is_text(name) and isinstance(choices, list) and choices and all(isinstance(each, str) for each in choices):
        return [f"{rule}: ({' | '.join(map(quoted, choices))}) {after}"]
    if tool.is_text(name):
        return text_rules(rule, after, schema)
    return [f"{rule}: json{rule} {after}", f"json{rule}: %json {schema_json(tool.schema_of(name))}"]


def text_rules(rule: str, after: str, schema: Any = None) -> list[str]:
    """Return the rules of a text up to `after`, which is Lark. A schema's pattern, or its lengths, are kept."""
    first, mark, rest = after.partition(" <[")
    if after.startswith("<["):
        return [f"{rule}: {rule}text {after}", f"{rule}text: {_pattern(schema)}"]
    return [f"{rule}: {rule}text {mark}{rest}", f"{rule}text[suffix={first}]: {_pattern(schema)}"]


def _pattern(schema: Any) -> str:
    """Return the regular expression of a text in Lark."""
    about = schema if isinstance(schema, Mapping) else {}
    least, most, pattern = about.get("minLength", 0), about.get("maxLength", ""), about.get("pattern")
    if isinstance(pattern, str):
        body = pattern.removeprefix("^") if pattern.startswith("^") else f"(.|\\n)*({pattern})"
        body = body.removesuffix("$") if body.endswith("$") and not body.endswith("\\$") else f"({body})(.|\\n)*"
        return f"/({body.replace('/', chr(92) + '/')})/"
    return f"/(.|\\n){{{least},{most}}}/" if least or most != "" else "/(.|\\n)*/"
