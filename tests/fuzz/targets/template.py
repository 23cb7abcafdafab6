"""Chat templates in the sandbox: spliced real ones, and hostile ones."""

import random
from pathlib import Path
from typing import Any

from headrace.models.text.chat_template import ChatTemplate
from tests.faults.test_template_attacks import BEYOND, CODE, MALFORMED
from tests.fuzz.mutate import TEXTS, text, value
from tests.support.families import FAMILIES

_EXPRESSIONS = (
    "messages", "messages[0]", "messages[-1].content", "m.content", "m['role']", "bos_token", "tools", "x", "y",
    "loop", "loop.index0", "self", "namespace(a=1)", "range(9)", "range(99999)", "'ab'", "''", "1", "-1", "0.5",
    "10**9", "[1, 'a']", "{'a': 1}", "(1, 2)", "none", "true", "undefined_thing", "dict(a=1)", "strftime_now('%Y')",
    "raise_exception", "caller", "varargs", "kwargs", "cycler", "lipsum", "joiner",
)  # fmt: skip
_FILTERS = (
    "abs", "attr('x')", "batch(2)", "capitalize", "center(99)", "default(1)", "dictsort", "escape", "filesizeformat",
    "first", "float", "forceescape", "format(1)", "groupby('role')", "indent(9)", "int", "items", "join(',')", "last",
    "length", "list", "lower", "map('upper')", "map(attribute='role')", "max", "min", "pprint", "random",
    "reject('none')", "rejectattr('a')", "replace('a', 'bb')", "reverse", "round", "safe", "select",
    "selectattr('role')", "slice(3)", "sort", "sort(attribute='role')", "string", "striptags", "sum", "title",
    "tojson", "tojson(indent=2)", "trim", "truncate(3)", "unique", "upper", "urlencode", "urlize", "wordcount",
    "wordwrap(3)", "xmlattr", "map('tojson') | join", "map('list') | list", "e", "d", "count",
)  # fmt: skip
_METHODS = (
    "split('a')", "rsplit(' ', 1)", "splitlines()", "strip()", "replace('a', 'b' * 99)", "join(['a', 'b'])",
    "startswith('a')", "format(1, a=2)", "format_map({})", "encode()", "items()", "keys()", "get('a')", "append(1)",
    "update({})", "pop()", "__class__", "upper()", "zfill(9)", "count('a')", "partition('a')", "expandtabs(9)",
    "isdigit()", "find('a')", "title()", "casefold()", "removeprefix('a')", "translate({})", "copy()", "index(1)",
)  # fmt: skip
_TESTS = (
    "defined",
    "none",
    "string",
    "mapping",
    "iterable",
    "sequence",
    "number",
    "odd",
    "callable",
    "in [1]",
    "eq 1",
    "sameas x",
    "divisibleby 3",
    "filter 'x'",
)
_OPERATORS = ("+", "-", "*", "/", "//", "%", "**", "~", "==", "!=", "<", ">=", "in", "not in", "and", "or")
_SECONDS = 0.5  # slow ones then end within the time of any input


class ChatTemplates:
    """Source and chat; gives text or a one-line error."""

    def __init__(self, folder: Path) -> None:
        used = [family.template for family in FAMILIES.values()]
        hostile = [source for group in (CODE, *BEYOND, MALFORMED) for source in group.values()]
        self._used = used
        self._hostile = [source for source in hostile if len(source) < 60_000]

    def make(self, chance: random.Random) -> tuple[str, list[Any], Any]:
        kind = chance.random()
        if kind < 0.45:
            source = "".join(_statement(chance, 3) for _ in range(chance.randint(1, 6)))
        elif kind < 0.98:
            source = _spliced(chance, chance.choice(self._used), chance.choice(self._used))
        else:  # slow ones, by intention
            source = _spliced(chance, chance.choice(self._hostile), chance.choice(self._used))
        roles = ("system", "user", "assistant", "tool", "user", chance.choice(TEXTS))
        messages: list[Any] = [
            {"role": chance.choice(roles), "content": text(chance, 10) if chance.random() < 0.8 else value(chance)}
            for _ in range(chance.randrange(5))
        ]
        if chance.random() < 0.1 and messages:
            messages[0][chance.choice(TEXTS)] = value(chance)
        return source, messages, value(chance) if chance.random() < 0.1 else None

    def run(self, given: tuple[str, list[Any], Any]) -> None:
        source, messages, tools = given
        tools = [tools] if isinstance(tools, dict) else None
        said = ChatTemplate({"default": source}, {"bos_token": "<s>"}, _SECONDS).render(messages, tools=tools)
        assert len(said) <= 8_000_000


def _expression(chance: random.Random, depth: int) -> str:
    if depth == 0 or chance.random() < 0.3:
        return chance.choice(_EXPRESSIONS)
    inner = _expression(chance, depth - 1)
    match chance.randrange(9):
        case 0 | 1:
            return f"({inner} | {chance.choice(_FILTERS)})"
        case 2:
            return f"{inner}.{chance.choice(_METHODS)}"
        case 3 | 4:
            return f"({inner} {chance.choice(_OPERATORS)} {_expression(chance, depth - 1)})"
        case 5:
            return f"({inner} is {chance.choice(_TESTS)})"
        case 6:
            bounds = chance.choice(("0", "-1", "1:", "::-1", "'a'", ":99999", "x"))
            return f"{inner}[{bounds}]"
        case 7:
            return f"({inner} if {_expression(chance, depth - 1)} else {_expression(chance, depth - 1)})"
        case _:
            return f"[{inner}, {_expression(chance, depth - 1)}]"


def _statement(chance: random.Random, depth: int) -> str:
    body = "".join(_statement(chance, depth - 1) for _ in range(chance.randrange(3))) if depth else "a"
    said = _expression(chance, 3)
    match chance.randrange(12):
        case 0 | 1 | 2:
            return "{{ " + said + " }}"
        case 3:
            return "{% set x = " + said + " %}"
        case 4:
            return "{% for m in " + said + " %}" + body + "{% endfor %}"
        case 5:
            return "{% if " + said + " %}" + body + "{% else %}b{% endif %}"
        case 6:
            return "{% set y %}" + body + "{% endset %}"
        case 7:
            return "{% macro f(a, b=1) %}" + body + "{% endmacro %}{{ f(" + said + ") }}"
        case 8:
            return "{% set ns = namespace(a=" + said + ") %}{% set ns.a = ns.a ~ 1 %}{{ ns.a }}"
        case 9:
            return "{% filter " + chance.choice(_FILTERS) + " %}" + body + "{% endfilter %}"
        case 10:
            return "{% for k, v in " + said + ".items() recursive %}" + body + "{{ loop(" + said + ") }}{% endfor %}"
        case _:
            return chance.choice(
                (
                    "{% generation %}a{% endgeneration %}",
                    "{% break %}",
                    "{% with x = 1 %}a{% endwith %}",
                    "{% call f(1) %}a{% endcall %}",
                    "{# x #}",
                    "{% raw %}{{{% endraw %}",
                    "{%- do x %}",
                    "<|im_end|>\n",
                )
            )


def _spliced(chance: random.Random, source: str, other: str) -> str:
    """Drop, double, move or replace parts of a template."""
    for _ in range(chance.randint(1, 3)):
        a, b = sorted(chance.randrange(len(source) + 1) for _ in range(2))
        b = min(b, a + 200)
        match chance.randrange(5):
            case 0:
                source = source[:a] + source[b:]
            case 1:
                source = source[:b] + source[a:b] + source[b:]
            case 2:
                c = chance.randrange(len(other) + 1)
                source = source[:a] + other[c : c + 80] + source[b:]
            case 3:
                source = (
                    source[:a]
                    + chance.choice(
                        ("{{ " + _expression(chance, 2) + " }}", _statement(chance, 1), chance.choice(TEXTS))
                    )
                    + source[a:]
                )
            case _:
                place = source.find("message", a)
                if place >= 0:
                    source = source[:place] + _expression(chance, 2) + source[place + len("message") :]
    return source
