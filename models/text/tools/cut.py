"""Calls at the end of an answer that a limit cut: the last one has a part of its arguments' JSON text.

`ToolForm.cut_calls` of the forms call these, within `stream.ToolStream.finish`.

Guard: tests/models/text/tools/test_forms.py.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping

from headrace.models.text.stop_strings import half_length
from headrace.models.text.tools.call import Reading, Tool, ToolCall
from headrace.models.text.tools.json_value import Brackets
from headrace.models.text.tools.markup import Markup

ReadCall = Callable[[str], Reading | None]
"""Reads the calls that a text begins with; the answer has ended."""


def cut_json_calls(text: str, head: re.Pattern[str]) -> tuple[ToolCall, ...]:
    """Return the calls in a text whose arguments are JSON. head: see `ToolForm`."""
    calls: list[ToolCall] = []
    position = 0
    while (begin := head.search(text, position)) is not None:
        brackets = Brackets(begin.end())
        brackets.scan(text)
        position = brackets.position
        calls.append(ToolCall(begin[1], text[begin.end() : position]))
    return tuple(calls)


def cut_tagged_calls(text: str, read: ReadCall, markup: Markup, tools: Mapping[str, Tool]) -> tuple[ToolCall, ...]:
    """Return the calls in a text whose arguments are tagged values. tools: by name."""
    key_begin = markup.key_begin or ""
    last_key = text.rfind(key_begin)
    last_value_end = text.rfind(markup.value_end)
    # The text as it would go on from where the limit cut: after a value, within a value, or within a key.
    after_value = without_half(without_half(text, markup.end), key_begin) + markup.end
    within_value = without_half(text, markup.value_end) + markup.value_end + markup.end
    closed = [after_value, within_value]
    if last_key > last_value_end:
        closed.append(text[:last_key] + markup.end)
    calls = closed_calls(closed, read, tools)
    if calls or last_value_end < 0:
        return calls
    # The limit cut the head of another call: those before it are whole.
    return whole_calls(text[: last_value_end + len(markup.value_end)] + markup.end, read, tools)


def closed_calls(texts: Iterable[str], read: ReadCall, tools: Mapping[str, Tool]) -> tuple[ToolCall, ...]:
    """Return the calls in the first text that consists of calls. texts: the cut one, closed in various ways.

    The last call's arguments are without their end. tools: by name.
    """
    for text in texts:
        calls = whole_calls(text, read, tools)
        if calls:
            last = calls[-1]
            return (*calls[:-1], ToolCall(last.name, _open(last.arguments, tools[last.name])))
    return ()


def whole_calls(text: str, read: ReadCall, tools: Mapping[str, Tool]) -> tuple[ToolCall, ...]:
    """Return the calls in a text that consists of calls of the tools; none for any other."""
    reading = read(text)
    if reading is None or text[reading.length :].strip() or not all(call.name in tools for call in reading.calls):
        return ()
    return reading.calls


def _open(arguments: str, tool: Tool) -> str:
    """Return the JSON text of an object without its end, and without the end of its last value."""
    pairs = list(json.loads(arguments).items())
    opened = arguments.removesuffix("}")
    if not pairs or not isinstance(pairs[-1][1], str):
        return opened
    name, value = pairs[-1]
    if "string" in tool.kinds(name):
        return opened.removesuffix('"')
    # Half a value of another type, which was read as a text.
    return f"{opened.removesuffix(json.dumps(value, ensure_ascii=False))}{value}"


def without_half(text: str, mark: str) -> str:
    """Return a text without a beginning of `mark` at its end."""
    return text[: len(text) - half_length(text, mark)]
