"""Hermes, Qwen 2.5 and 3, Granite 4, SmolLM3: JSON in tags.

<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

from collections.abc import Callable, Sequence

from headrace.models.text.tools.call import Reading, Tool, calls_of, no_call
from headrace.models.text.tools.form import Marks, ToolForm, arguments_rule, json_head, quoted
from headrace.models.text.tools.json_value import UnfinishedError, leading_value
from headrace.models.text.tools.markup import Markup

MARKUP = ("<tool_call>", "</tool_call>")


class Hermes(ToolForm):
    head = json_head()
    separator = "\n"
    markup = Markup(
        begin='<tool_call>\n{"name": "',
        middle='", "arguments": ',
        end="}\n</tool_call>",
        separator='}\n</tool_call>\n<tool_call>\n{"name": "',
    )

    def __init__(self, marks: Marks) -> None:
        self.rule_begin, self._rule_end = MARKUP
        self._begin, self._end = map(marks, MARKUP)
        self.begins = (self._begin,)

    def read(self, text: str, *, final: bool) -> Reading | None:
        return read_json(text, len(self._begin), self._end, final=final)

    def rules(self, tools: Sequence[Tool], literal: Callable[[str], str]) -> str:
        return json_rules(tools, '\n{"name": "%s", "arguments": ', "}\n", literal(self._rule_end))


def read_json(text: str, start: int, end: str, *, final: bool) -> Reading | None:
    """Read a JSON call, or a list of them, after `start` characters of markup; `end` may be missing."""
    try:
        value, position = leading_value(text, start)
    except UnfinishedError:
        return no_call(start, final=final)
    except ValueError:
        return Reading(start)
    calls = calls_of(value)
    if not calls:
        return Reading(start)
    return ended(text, position, end, calls=Reading(position, calls), final=final)


def ended(text: str, position: int, end: str, *, calls: Reading, final: bool) -> Reading | None:
    """Return the calls with their closing markup, after spaces from `position` on; None while it is incomplete."""
    rest = text[position:].lstrip()
    if end and rest.startswith(end):
        return Reading(len(text) - len(rest) + len(end), calls.calls)
    if end and not final and end.startswith(rest):
        return None
    return calls


def json_rules(tools: Sequence[Tool], before: str, after: str, end: str) -> str:
    """Return the rules of calls as JSON objects. before: text up to the arguments, with the tool's name for %s."""
    calls = [f"call{n}: {quoted(before % tool.name)} arguments{n} {quoted(after)}" for n, tool in enumerate(tools)]
    names = " | ".join(f"call{n}" for n in range(len(tools)))
    return "\n".join([f"rest: ({names}) {end}", *calls, *(arguments_rule(n, tool) for n, tool in enumerate(tools))])


def json_list_rules(tools: Sequence[Tool], *, parallel: bool) -> str:
    """Return the rules of a list of calls as JSON objects. parallel: it may have several."""
    call = json_rules(tools, '{"name": "%s", "arguments": ', "}", "").replace("rest:", "call:", 1)
    more = ""
    if parallel:
        more = '(", " call)*'
    return f'rest: "[" call {more} "]"\n{call}'
