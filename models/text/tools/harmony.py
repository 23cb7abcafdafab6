"""Harmony (GPT-OSS): a message to a function, in a channel of its own. Each call ends the turn.

    <|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>
     to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>

The detokenizer of thinking (`models.text.thinking_forms`) writes the head of such a message between two characters that
no text contains.

Guard: tests/models/text/tools/test_forms.py.
"""

import re
from collections.abc import Callable, Sequence

from headrace.models.text.thinking_forms import CALL_BEGIN, CALL_MESSAGE
from headrace.models.text.tools.call import Reading, Tool, calls_of, no_call
from headrace.models.text.tools.form import MarkupTokens, ToolForm, arguments_rule, one_call, quoted
from headrace.models.text.tools.json_value import UnfinishedError, leading_value

_RECIPIENT = "functions."


class Harmony(ToolForm):
    """See `ToolForm`."""

    begins = (CALL_BEGIN,)
    rule_begin = "<|channel|>"
    text_head = "final<|message|>"
    other_calls = "recipient_first"
    head = re.compile(f"{re.escape(CALL_BEGIN + _RECIPIENT)}([^{CALL_MESSAGE}]+){CALL_MESSAGE}")

    def __init__(self, _marks: MarkupTokens) -> None:
        pass

    def read(self, text: str, *, final: bool) -> Reading | None:
        # CALL_BEGIN, head, CALL_MESSAGE, arguments: the two marks are a character each.
        head, separator, _ = text[1:].partition(CALL_MESSAGE)
        if not separator:
            return no_call(len(text), final=final)
        start = len(head) + 2
        try:
            value, end = leading_value(text, start)
        except UnfinishedError:
            if not final:
                return None
            if text[start:].strip():
                return Reading(len(text))
            value = {}  # a call without any
            end = len(text)
        except ValueError:
            return Reading(start)
        calls = calls_of({"name": head.removeprefix(_RECIPIENT), "arguments": value})
        if not calls:
            return Reading(start)
        return Reading(end, calls)

    def rules(self, tools: Sequence[Tool], literal: Callable[[str], str]) -> str:
        channel, constrain, message = map(literal, ("<|channel|>", "<|constrain|>", "<|message|>"))
        rules = [
            f"rest: {one_call(tools)}",
            f"recipient_first: {' | '.join(f'first{number}' for number in range(len(tools)))}",
        ]
        for number, tool in enumerate(tools):
            recipient = f"to={_RECIPIENT}{tool.name}"
            # The template writes the recipient before the channel, the model mostly within it.
            first = f'SPACE? {quoted(recipient)} {channel} "commentary " {constrain}? "json" {message}'
            rules += [
                f'call{number}: {quoted(f"commentary {recipient} ")} {constrain} "json" {message} arguments{number}',
                f"first{number}: {first} arguments{number}",
                arguments_rule(number, tool),
            ]
        return "\n".join(rules)
