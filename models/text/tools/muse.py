"""Muse: a message to a function, as in Harmony, with tagged parameters in it.

     to=get_weather<|message|><atem:function_calls>
    <atem:invoke name="get_weather">
    <atem:parameter name="city">Paris</atem:parameter>
    </atem:invoke>
    </atem:function_calls><|eom|>

The detokenizer writes the head of such a message as for Harmony.
"""

from collections.abc import Callable, Mapping, Sequence

from headrace.models.text.thinking_forms import CALL_BEGIN, CALL_MESSAGE
from headrace.models.text.tools.call import Reading, Tool, no_call
from headrace.models.text.tools.form import Marks, quoted
from headrace.models.text.tools.markup import Markup
from headrace.models.text.tools.written import Written

_MARKUP = Markup(
    begin='<atem:function_calls>\n<atem:invoke name="',
    middle='">\n',
    end="</atem:invoke>\n</atem:function_calls>",
    separator=None,
    key_begin='<atem:parameter name="',
    key_end='">',
    value_end="</atem:parameter>\n",
)


class Muse(Written):
    """See `ToolForm`. tools: by name."""

    separator = "<|eom|><|start|>assistant"

    def __init__(self, marks: Marks, tools: Mapping[str, Tool]) -> None:
        super().__init__(marks, tools, _MARKUP)
        self.begins = (CALL_BEGIN,)
        self.rule_begin = ""  # an answer begins within the head of a message

    def read(self, text: str, *, final: bool) -> Reading | None:
        head, separator, message = text.partition(CALL_MESSAGE)
        if not separator:
            return no_call(len(text), final=final)
        reading = super().read(message, final=final)
        start = len(head) + len(separator)
        if reading is None:
            return None
        return Reading(start + reading.length, reading.calls)

    def rules(self, tools: Sequence[Tool], literal: Callable[[str], str]) -> str:
        names, rules = self._tagged_rules(literal).calls(tools)
        begin = quoted(_MARKUP.begin)
        end = quoted(_MARKUP.end)
        # The name stands in the head of the message, too.
        for number, tool in enumerate(tools):
            rules.append(f"whole{number}: SPACE? {literal(f'to={tool.name}<|message|>')} {begin} call{number} {end}")
        return "\n".join([f"rest: {names.replace('call', 'whole')}", *rules])
