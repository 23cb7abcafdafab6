"""GLM from 4.5 on: a name and tagged keys and values.

<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>Paris</arg_value>
</tool_call>
"""

from headrace.models.text.tools.markup import Markup

TAGS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
MARKUP = Markup(
    begin="<tool_call>",
    middle="\n",
    end="</tool_call>",
    separator="</tool_call>\n<tool_call>",
    key_begin="<arg_key>",
    key_end="</arg_key>\n<arg_value>",
    value_end="</arg_value>\n",
)
