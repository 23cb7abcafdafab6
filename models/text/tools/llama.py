"""Llama 3 and 4: an answer that is a call, or several, sometimes in control tokens.

Llama 3, calls as JSON objects, maybe after `<|python_tag|>`:

{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "time", "parameters": {}}

Llama 4, calls as a list in Python, or as JSON objects without a separator:

<|python_start|>[get_weather(city="Paris"), time()]<|python_end|>
<|python_start|><|python_end|>{"name": "get_weather", "parameters": {"city": "Paris"}}{"name": "time", "parameters": {}}

`read` accepts lists and JSON objects from both versions.

Guard: tests/models/text/tools/test_forms.py.
"""

import re
from collections.abc import Callable, Mapping, Sequence

from headrace.models.text.tools import pythonic
from headrace.models.text.tools.call import Reading, Tool, ToolCall, calls_of, no_call
from headrace.models.text.tools.cut import cut_json_calls
from headrace.models.text.tools.form import MarkupTokens, ToolForm, json_head
from headrace.models.text.tools.json_forms import json_rules
from headrace.models.text.tools.json_value import UnfinishedError, leading_value
from headrace.models.text.tools.markup import Markup

TAGS_3 = ("<|python_tag|>", "")  # begin and end; Llama 3 has no end
TAGS_4 = ("<|python_start|>", "<|python_end|>")
MARKUP = (TAGS_3[0], *TAGS_4)

_HEAD = json_head("parameters")  # the same text as in `Llama.markup` and `Llama._before`


class Llama(ToolForm):
    """See `ToolForm`. Calls are JSON or a list as Python writes it, and have to name one of the tools outside tags."""

    head: re.Pattern[str] | None = _HEAD

    bare = True
    separator: str | None = "; "
    # Calls in a prompt are written with `markup`, forced ones with `_before`, and cut ones are found by `_HEAD`: all
    # three have the same text before the arguments.
    markup = Markup(begin='{"name": "', middle='", "parameters": ', end="}", separator='}; {"name": "')
    rule_begin = ""
    _before = '{"name": "%s", "parameters": '

    def __init__(
        self,
        marks: MarkupTokens,
        tools: Mapping[str, Tool],
        tags: tuple[str, str] = TAGS_3,
        *,
        writes_lists: bool = False,
    ) -> None:
        """See `ToolForm`.

        marks: tokens of the markup.
        tools: by name.
        tags: around calls, where there are any.
        writes_lists: forced calls are a Python list.
        """
        self._tags = tags
        self._begin, self._end = map(marks, tags)
        self.begins: Sequence[str] = (self._begin,)
        self._tools = tools
        self._writes_lists = writes_lists
        if writes_lists:
            self.separator = None
            self.head = None  # a list has no JSON arguments to emit early; `cut_calls` reads JSON by _HEAD all the same
        elif self._end:  # Llama 4's template writes nothing between calls
            self.separator = ""

    def read(self, text: str, *, final: bool) -> Reading | None:
        # Tags before the first call.
        is_tagged = text.startswith(self._begin)
        start = self._after_tags(text)
        if start == len(self._begin) and is_tagged and not final and self._end.startswith(text[start:]):
            return None  # empty tags may follow
        try:
            calls, position = self._leading_calls(text, start, is_tagged=is_tagged)
        except UnfinishedError:
            # `start` is 0 without tags. A reading of no characters would be repeated for ever.
            return no_call(max(start, 1), final=final)
        if not calls:
            return Reading(max(start, 1))

        # Further calls, up to the closing tag or other text.
        while True:
            rest = text[position:].lstrip()
            if not rest and not final:
                return None  # a separator and another call, or the closing tag, may follow
            if self._end and rest.startswith(self._end):
                return Reading(len(text) - len(rest) + len(self._end), calls)
            if self._end and not final and self._end.startswith(rest):
                return None
            start = len(text) - len(rest.removeprefix(";"))
            try:
                more, position = self._leading_calls(text, start, is_tagged=is_tagged)
            except UnfinishedError:
                return Reading(start, calls) if final else None
            if not more:
                return Reading(start, calls)
            calls += more

    def _after_tags(self, text: str) -> int:
        """Return the position after the opening tag, or after the empty tags that Llama 4's template writes first."""
        start = 0
        if text.startswith(self._begin):
            start = len(self._begin)
        if self._end and text.startswith(self._end, start):
            start += len(self._end)
        return start

    def _leading_calls(self, text: str, start: int, *, is_tagged: bool) -> tuple[tuple[ToolCall, ...], int]:
        """Return the calls of a JSON value or a list of Python's at `start`, and the position after it; none for text.

        Raises UnfinishedError.
        """
        listed = pythonic.leading_calls(text, start, self._tools)
        if listed is not None:
            return listed
        try:
            value, end = leading_value(text, start)
        except ValueError:
            return (), start
        calls = calls_of(value)
        if not is_tagged and not all(call.name in self._tools for call in calls):
            return (), end
        return calls, end

    def cut_calls(self, text: str) -> tuple[ToolCall, ...]:
        listed = pythonic.cut_calls(text[self._after_tags(text) :], self._tools)
        if listed:
            return listed
        calls = cut_json_calls(text, _HEAD)
        if text.startswith(self._begin):  # in tags JSON may name any tool, as in `read`
            return calls
        return tuple(call for call in calls if call.name in self._tools)

    def rules(self, tools: Sequence[Tool], literal: Callable[[str], str]) -> str:
        if self._writes_lists:
            return pythonic.list_rules(tools, "", parallel=self.parallel)
        opening = ""
        if self._end:  # Llama 4's template writes empty tags before calls: `rest: (TAGS)? (call0 | call1)`
            opening = f"({literal(''.join(self._tags))})?"
        return json_rules(tools, self._before, "}", literal(""), opening=opening)
