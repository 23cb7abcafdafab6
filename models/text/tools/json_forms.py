"""Calls as JSON: in tags, as a list, or as the whole answer.

Rows of `table.FORMS` make them. `tests/models/text/tools/test_forms.py` reads each form in pieces of any size.
"""

import re
from collections.abc import Callable, Sequence

from headrace.models.text.tools.call import Reading, Tool, calls_of, no_call
from headrace.models.text.tools.form import MarkupTokens, ToolForm, arguments_rules, json_head, one_call, quoted
from headrace.models.text.tools.json_value import UnfinishedError, leading_value
from headrace.models.text.tools.markup import Markup

HERMES_MARKUP = ("<tool_call>", "</tool_call>")


class Hermes(ToolForm):
    """Hermes, Qwen 2.5 and 3, Granite 4, SmolLM3: objects in tags.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>
    """

    head = json_head()
    separator = "\n"
    markup = Markup(
        begin='<tool_call>\n{"name": "',
        middle='", "arguments": ',
        end="}\n</tool_call>",
        separator='}\n</tool_call>\n<tool_call>\n{"name": "',
    )

    def __init__(self, marks: MarkupTokens) -> None:
        self.rule_begin, self._rule_end = HERMES_MARKUP
        self._begin, self._end = map(marks, HERMES_MARKUP)
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


def json_rules(
    tools: Sequence[Tool], before: str, after: str, end: str, *, rule: str = "rest", opening: str = ""
) -> str:
    """Return the rules of calls as JSON objects.

    before: text up to the arguments, with the tool's name for %s.
    after: text from the arguments to the end of the object.
    end: Lark of the text after it.
    rule: name of the first rule.
    opening: Lark of the text before the object.
    """
    calls = [f"call{n}: {quoted(before % tool.name)} arguments{n} {quoted(after)}" for n, tool in enumerate(tools)]
    return "\n".join([f"{rule}: {opening} ({one_call(tools)}) {end}", *calls, *arguments_rules(tools)])


def json_list_rules(tools: Sequence[Tool], *, parallel: bool) -> str:
    """Return the rules of a list of calls as JSON objects. parallel: it may have several."""
    call = json_rules(tools, '{"name": "%s", "arguments": ', "}", "", rule="call")
    more = ""
    if parallel:
        more = '(", " call)*'
    return f'rest: "[" call {more} "]"\n{call}'


GRANITE_MARKUP = ("<|tool_call|>",)


class Granite(ToolForm):
    """Granite 3: a list up to the end of the turn.

    <|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]
    """

    head = json_head()
    markup = Markup(
        begin='<|tool_call|>[{"name": "',
        middle='", "arguments": ',
        end="}]",
        separator='}, {"name": "',
    )

    def __init__(self, marks: MarkupTokens) -> None:
        [self.rule_begin] = GRANITE_MARKUP
        self._begin = marks(self.rule_begin)
        self.begins = (self._begin,)

    def read(self, text: str, *, final: bool) -> Reading | None:
        return read_json(text, len(self._begin), "", final=final)

    def rules(self, tools: Sequence[Tool], literal: Callable[[str], str]) -> str:  # noqa: ARG002 - all of it is text
        return json_list_rules(tools, parallel=self.parallel)


# The beginning of a fenced answer, up to its JSON.
_FENCE = re.compile(r"\s*```(?:json|tool_call|tool_code)?\s*(?=[{\[])")
_CLOSE = "```"
_OPENINGS = ("```json", "```tool_call", "```tool_code", "```")


class Generic(ToolForm):
    """Models without a form of their own: an answer that is an object or a list of them, maybe in a fence.

    ```json
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    ```

    names: of the tools; the JSON has to name one of them.
    """

    head = json_head()

    begins: Sequence[str] = ()
    bare = True
    rule_begin = ""

    def __init__(self, _marks: MarkupTokens, names: Sequence[str] = ()) -> None:
        self._names = names
        self.names = names

    def read(self, text: str, *, final: bool) -> Reading | None:
        # The JSON begins after a fence, after the comma between two calls, or at once.
        fence = _FENCE.match(text)
        if fence is None and text.lstrip().startswith("`"):
            start = text.strip()
            growing = any(opening.startswith(start) for opening in _OPENINGS) or start in _OPENINGS
            return no_call(1, final=final or not growing)
        start_of_json = 0
        close = ""
        if fence is not None:
            start_of_json = fence.end()
            close = _CLOSE
        elif text.lstrip().startswith(","):  # between calls
            start_of_json = text.find(",") + 1
        try:
            value, position = leading_value(text, start_of_json)
        except UnfinishedError:
            return no_call(1, final=final)
        except ValueError:
            return Reading(1)
        calls = calls_of(value)
        if not calls or not all(call.name in self._names for call in calls):
            return Reading(1)
        return ended(text, position, close, calls=Reading(position, calls), final=final)

    def rules(self, tools: Sequence[Tool], literal: Callable[[str], str]) -> str:
        return json_rules(tools, '{"name": "%s", "arguments": ', "}", literal(""))
