"""Functionary 3: a recipient and its arguments; `models.text.recipients` writes the mark that the prompt ends with.

>>>get_weather
{"city": "Paris"}>>>time
{}

Guard: tests/models/text/tools/test_forms.py.
"""

import re
from collections.abc import Callable, Mapping, Sequence

from headrace.models.text.recipients import MARK
from headrace.models.text.tools.call import Reading, Tool, ToolCall, no_call
from headrace.models.text.tools.form import MarkupTokens, ToolForm, arguments_rules, one_call, quoted
from headrace.models.text.tools.json_value import UnfinishedError, leading_value
from headrace.models.text.tools.markup import Markup

_LONGEST_HEAD = len(MARK) + 128 + 1  # characters: the mark, a name, the end of its line


class Functionary(ToolForm):
    """See `ToolForm`. tools: by name."""

    begins = (MARK,)
    rule_begin = ""  # the prompt has the first mark
    separator = MARK
    head = re.compile(f"{MARK}([A-Za-z0-9_.:/-]{{1,128}})\n\\s*(?={{)")
    markup = Markup(begin=MARK, middle="\n", end="", separator=MARK)

    def __init__(self, _marks: MarkupTokens, tools: Mapping[str, Tool]) -> None:
        self._tools = tools
        self.names = tools.keys()

    def read(self, text: str, *, final: bool) -> Reading | None:
        head = self.head.match(text)
        if head is None:
            name, _, rest = text[len(MARK) :].partition("\n")
            may_go_on = not rest.strip() and any(tool.startswith(name) for tool in self._tools)
            return no_call(len(MARK), final=final or not may_go_on or len(text) >= _LONGEST_HEAD)
        if head[1] not in self._tools:
            return Reading(head.end())
        try:
            value, end = leading_value(text, head.end())
        except UnfinishedError:
            return no_call(len(MARK), final=final)
        except ValueError:
            return Reading(len(MARK))
        return Reading(end, (ToolCall.of(head[1], value),))

    def rules(self, tools: Sequence[Tool], literal: Callable[[str], str]) -> str:  # noqa: ARG002 - all of it is text
        heads = [quoted(f"{tool.name}\n") for tool in tools]
        calls = [f"call{number}: {head} arguments{number}" for number, head in enumerate(heads)]
        return "\n".join([f"rest: {one_call(tools)}", *calls, *arguments_rules(tools)])
