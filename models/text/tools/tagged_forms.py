"""Calls as tagged keys and values, in markup that is known without asking the template.

Rows of `table.FORMS` make them. Calls in markup that `written.learn` finds in a template need no class here.

Guards: tests/models/text/tools/test_forms.py and test_round_trip.py.
"""

import re
from collections.abc import Callable, Mapping, Sequence

from headrace.models.text.thinking_forms import CALL_BEGIN, CALL_MESSAGE
from headrace.models.text.tools.call import KINDS, Reading, Tool, no_call
from headrace.models.text.tools.form import MarkupTokens, one_call, quoted
from headrace.models.text.tools.markup import Markup
from headrace.models.text.tools.tagged import tagged_call
from headrace.models.text.tools.written import Written

GLM_TAGS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
GLM = Markup(
    begin="<tool_call>",
    middle="\n",
    end="</tool_call>",
    separator="</tool_call>\n<tool_call>",
    key_begin="<arg_key>",
    key_end="</arg_key>\n<arg_value>",
    value_end="</arg_value>\n",
)
"""GLM from 4.5 on, where the template writes no call.

<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>Paris</arg_value>
</tool_call>
"""


def deepseek_markup(section: str) -> Markup:
    """Return the markup of DeepSeek 3.2 and 4. section: the name of the tag around calls.

    <｜DSML｜function_calls><｜DSML｜invoke name="get_weather">
    <｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter></｜DSML｜invoke>...
    """
    tag = "｜DSML｜"
    return Markup(
        begin=f'<{tag}{section}>\n<{tag}invoke name="',
        middle='">\n',
        end=f"</{tag}invoke>\n</{tag}{section}>",
        separator=f'</{tag}invoke>\n<{tag}invoke name="',
        key_begin=f'<{tag}parameter name="',
        key_end='" string="true">',
        value_end=f"</{tag}parameter>\n",
        typed_key_ends=dict.fromkeys(KINDS - {"string"}, '" string="false">'),
    )


_FUNCTION_BEGIN = "<function="
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
# A value may contain `</parameter>`: that ends it only before another tag, or at the end of the text.
_PARAMETER = re.compile(
    r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>|</tool_call>|$))", re.DOTALL
)
_FUNCTION_END = re.compile(r"\s*</function>")
_QWEN_CODER = Markup(
    begin="<tool_call>\n<function=",
    middle=">\n",
    end="</function>\n</tool_call>",
    separator="</function>\n</tool_call>\n<tool_call>\n<function=",
    key_begin="<parameter=",
    key_end=">\n",
    value_end="\n</parameter>\n",
)


class QwenCoder(Written):
    """Qwen 3 coder, Qwen 3.5, Nemotron 3: calls that models write without `<tool_call>`, too.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

    tools: by name.
    """

    separator = "\n"

    def __init__(self, marks: MarkupTokens, tools: Mapping[str, Tool]) -> None:
        super().__init__(marks, tools, _QWEN_CODER)
        self.begins = (marks("<tool_call>"), _FUNCTION_BEGIN)
        self._call_end = marks("</tool_call>")

    def read(self, text: str, *, final: bool) -> Reading | None:
        # The name. Without `<tool_call>` the call begins at 0.
        start = 0
        if text.startswith(self.begins[0]):
            start = len(self.begins[0])
        # As text if it is no call: at least a character, since a reading of none would be read again and again.
        no_call_length = max(1, start)
        body = text[start:].lstrip()
        if not body.startswith(_FUNCTION_BEGIN):
            may_become_call = _FUNCTION_BEGIN.startswith(body)
            return no_call(no_call_length, final=final or not may_become_call)
        head = _FUNCTION.match(text, start)
        if head is None:
            return no_call(no_call_length, final=final)

        # Parameters, and the end of the call.
        position = head.end()
        pairs: list[tuple[str, str]] = []
        while (parameter := _PARAMETER.match(text, position)) is not None:
            pairs.append((parameter[1], parameter[2]))
            position = parameter.end()
        close = _FUNCTION_END.match(text, position)
        if close is None:
            return no_call(no_call_length, final=final)
        call = tagged_call(head[1].strip(), pairs, self._tools)

        # The closing tag, if the call began with the opening one.
        rest = text[close.end() :].lstrip()
        if start and rest.startswith(self._call_end):
            return Reading(len(text) - len(rest) + len(self._call_end), (call,))
        if start and not final and self._call_end.startswith(rest):
            return None
        return Reading(close.end(), (call,))

    def rules(self, tools: Sequence[Tool], literal: Callable[[str], str]) -> str:
        rules = self._tagged_rules(tools, literal)
        # `<tool_call>` is the form's `rule_begin`; both tags may be control tokens, the markup between is text.
        begin = quoted(_QWEN_CODER.begin.removeprefix("<tool_call>"))
        end = quoted(_QWEN_CODER.end.removesuffix("</tool_call>"))
        return "\n".join([f"rest: {begin} ({one_call(tools)}) {end} {literal('</tool_call>')}", *rules])


_MUSE = Markup(
    begin='<atem:function_calls>\n<atem:invoke name="',
    middle='">\n',
    end="</atem:invoke>\n</atem:function_calls>",
    separator=None,
    key_begin='<atem:parameter name="',
    key_end='">',
    value_end="</atem:parameter>\n",
)


class Muse(Written):
    """Muse: a message to a function, as in Harmony, with tagged parameters in it.

     to=get_weather<|message|><atem:function_calls>
    <atem:invoke name="get_weather">
    <atem:parameter name="city">Paris</atem:parameter>
    </atem:invoke>
    </atem:function_calls><|eom|>

    The detokenizer writes the head of such a message as for Harmony. tools: by name.
    """

    separator = "<|eom|><|start|>assistant"

    def __init__(self, marks: MarkupTokens, tools: Mapping[str, Tool]) -> None:
        super().__init__(marks, tools, _MUSE)
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
        rules = self._tagged_rules(tools, literal)
        begin = quoted(_MUSE.begin)
        end = quoted(_MUSE.end)
        # The name stands in the head of the message, too. `call0` and the next ones are those of `tagged_rules`.
        messages: list[str] = []
        for number, tool in enumerate(tools):
            messages.append(f"whole{number}")
            rules.append(f"whole{number}: SPACE? {literal(f'to={tool.name}<|message|>')} {begin} call{number} {end}")
        return "\n".join([f"rest: {' | '.join(messages)}", *rules])
