"""Parameters of a call as tagged plain text: the arguments they make, and the rules of their values.

Forms with tagged values use both; `tagged_forms` and `written` have the markup. For a tool `look` with the parameter
`city`, a text, and the markup of Qwen Coder the rules are about

    call0: "look" ">\\n" parameters0 | "look" ">\\n"                        the latter if no parameter is required
    parameters0: parameter0x0                                              `?` after it, if it is not required
    parameter0x0: "<parameter=" "city" ">\\n" parameter0x0v0               a choice, where tags tell types apart
    parameter0x0v0: parameter0x0v0text
    parameter0x0v0text[suffix="\\n</parameter>\\n"]: /(.|\\n)*/

tests/models/text/tools/test_forms.py has an answer of each model, test_round_trip.py generated calls.
"""

import json
from collections.abc import Iterable, Mapping, Sequence, Set

from headrace.models.text.tools.call import Tool, ToolCall, kind_of, may_be_text, typed_value
from headrace.models.text.tools.form import literal_pattern, quoted, schema_json
from headrace.models.text.tools.markup import Markup
from headrace.runtime.config.typed import as_mapping


def tagged_call(
    name: str, pairs: Iterable[tuple[str, str]], tools: Mapping[str, Tool], texts: Set[str] = frozenset()
) -> ToolCall:
    """Return the call of a name and its parameters as text; the tool's schema says which are JSON.

    texts: parameters that are texts by their markup, if their schema allows one.
    """
    tool = tools.get(name)
    arguments: dict[str, object] = {}
    for key, value in pairs:
        arguments[key] = value
        if key not in texts or not may_be_text(tool, key):
            arguments[key] = typed_value(tool, key, value)
    return ToolCall.of(name, arguments)


def tagged_rules(lark: Markup, tools: Sequence[Tool]) -> list[str]:
    """Return the rules of one call of each tool, `call0` and the next ones. lark: markup with its texts as Lark."""
    rules: list[str] = []
    for number, tool in enumerate(tools):
        rules += _call_rules(lark, number, tool)
    return rules


def _call_rules(lark: Markup, number: int, tool: Tool) -> list[str]:
    """Return the rules of one tool's call: parameters in order, required ones always."""
    name = quoted(tool.name)
    empty = f"{name} {lark.head_without_arguments}"
    if not tool.properties and not tool.free:
        return [f"call{number}: {empty}"]
    call = f"{name} {lark.middle} parameters{number}"
    if tool.free or not any(map(tool.needs, tool.properties)):
        call += f" | {empty}"
    return [f"call{number}: {call}", *_parameter_rules(lark, number, tool)]


def _parameter_rules(lark: Markup, number: int, tool: Tool) -> list[str]:
    """Return the rule `parameters{number}` of one tool, and those that it refers to."""
    if tool.free:
        name = f"name{number}"
        value = f"value{number}"
        return [
            f"parameters{number}: ({lark.key_begin} {name} {lark.key_end_of('string')} {value})*",
            f"{name}: /[A-Za-z_][A-Za-z0-9_-]{{0,63}}/",
            *text_rules(value, lark.value_end),
        ]
    names: list[str] = []
    rules: list[str] = []
    for index, name in enumerate(tool.properties):
        rule = f"parameter{number}x{index}"
        names.append(rule if tool.needs(name) else f"{rule}?")
        rules += _value_rules(lark, rule, tool, name)
    return [f"parameters{number}: {' '.join(names)}", *rules]


def _value_rules(lark: Markup, rule: str, tool: Tool, name: str) -> list[str]:
    """Return the rules of a parameter: a choice of the texts before its value, if these tell its type."""
    kinds_of_end: dict[str, set[str]] = {}
    for kind in sorted(tool.kinds(name)):
        kinds_of_end.setdefault(lark.key_end_of(kind), set()).add(kind)
    choices: list[str] = []
    rules: list[str] = []
    for number, (key_end, kinds) in enumerate(kinds_of_end.items()):
        value = f"{rule}v{number}"
        choices.append(f"{lark.key_begin} {quoted(name)} {key_end} {value}")
        rules += _value(value, kinds, tool, name, lark.value_end)
    return [f"{rule}: {' | '.join(choices)}", *rules]


def _value(rule: str, kinds: Set[str], tool: Tool, name: str, after: str) -> list[str]:
    """Return the rules of one value of these types and the text after it, as Lark."""
    schema = tool.schema_of(name)
    choices = schema.get("enum")
    if isinstance(choices, list) and choices:
        written = [written_plainly(each) for each in choices if kind_of(each) in kinds]
        return [f"{rule}: ({' | '.join(map(quoted, written))}) {after}"]
    if "string" in kinds:  # of other types, too, where nothing tells them apart
        if kinds != {"string"}:
            return text_rules(rule, after)
        return text_rules(rule, after, schema)
    return [f"{rule}: (json{rule}{python_constants(kinds)}) {after}", f"json{rule}: %json {schema_json(schema)}"]


def written_plainly(value: object) -> str:
    """Return a value as markup has it: a text as it is, others as JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(value)


def python_constants(kinds: Set[str]) -> str:
    """Return Lark of further choices for values of some types: constants as templates without `tojson` print them."""
    return "".join(f' | "{text}"' for kind, texts in _PYTHON_CONSTANTS.items() if kind in kinds for text in texts)


_PYTHON_CONSTANTS = {"boolean": ("True", "False"), "null": ("None",)}


def text_rules(rule: str, after: str, schema: object = None) -> list[str]:
    """Return the rules of a text up to `after`, which is Lark. A schema's pattern, or its lengths, are kept.

    `after` is a control token (`<[7]>`), a literal (`"</value>"`), or a literal before a control token.
    """
    first, mark, rest = after.partition(" <[")
    pattern = _pattern(schema)
    if after.startswith("<["):
        return [f"{rule}: {rule}text {after}", f"{rule}text: /{pattern}/"]
    if mark:  # no text has the control token, so the text before it may stand in the value, too
        before_mark = literal_pattern(json.loads(first))
        return [f"{rule}: {rule}text {mark}{rest}", f"{rule}text: /{pattern}{before_mark}/"]
    return [f"{rule}: {rule}text", f"{rule}text[suffix={first}]: /{pattern}/"]


def _pattern(schema: object) -> str:
    """Return the regular expression of a text in Lark, without its slashes."""
    about = as_mapping(schema)
    least = about.get("minLength", 0)
    max_length = about.get("maxLength", "")
    pattern = about.get("pattern")
    if isinstance(pattern, str):
        # A pattern of JSON schema may match anywhere in a text.
        body = f"(.|\\n)*({pattern})"
        if pattern.startswith("^"):
            body = pattern.removeprefix("^")
        if body.endswith("$") and not body.endswith("\\$"):
            body = body.removesuffix("$")
        else:
            body = f"({body})(.|\\n)*"
        body = body.replace("/", "\\/")
        return f"({body})"
    if not least and max_length == "":
        return "(.|\\n)*"
    return f"(.|\\n){{{least},{max_length}}}"
